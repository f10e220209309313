"""Pipelines and models of diffusers."""

from __future__ import annotations

import sys

from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from hf_cpu_accel.hosts.find import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """Each model of a pipeline under the name of its component, or the model itself; None if `target` is not of diffusers.

    A pipeline may use one model in two places; it counts once. Schedulers, tokenizers and image processors stay as they are.
    """
    if isinstance(target, ModelMixin):
        return (_root(target),)
    pipelines = sys.modules.get("diffusers.pipelines.pipeline_utils")
    if pipelines is None or not isinstance(target, pipelines.DiffusionPipeline):
        return None
    names: dict[nn.Module, str] = {}
    for name, component in target.components.items():
        if isinstance(component, nn.Module):
            names.setdefault(component, name)
    return tuple(_root(model, name) for model, name in names.items())


def _root(model: nn.Module, name: str = "") -> Root:
    return Root(model, "diffusers", (model,), name, adds_in_training=True)
