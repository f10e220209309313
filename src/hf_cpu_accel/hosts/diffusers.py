"""Pipelines and models of diffusers."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.models import model_mixins
from hf_cpu_accel.hosts.root import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """Return the models of a pipeline with the names of their components, or the model itself; None if not of diffusers.

    A model that a pipeline uses twice is returned once. Schedulers, tokenizers and image processors are not changed.
    """
    if isinstance(target, nn.Module) and isinstance(target, model_mixins()):
        return (_root(target),)
    if not isinstance(target, loaded("diffusers.pipelines.pipeline_utils", "DiffusionPipeline")):
        return None
    pipe: Any = target
    names: dict[nn.Module, str] = {}
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            names.setdefault(component, name)
    return tuple(_root(model, name) for model, name in names.items())


def _root(model: nn.Module, name: str = "") -> Root:
    return Root(model, "diffusers", (model,), name, adds_in_training=True)
