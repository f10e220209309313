"""Pipelines and models of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.models import pretrained_models
from hf_cpu_accel.hosts.root import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """Return the model of a pipeline, or the model itself; None if `target` is not of transformers.

    Raises:
        TypeError: a pipeline without a PyTorch model.
    """
    if is_pipeline(target):
        pipe: Any = target
        model = pipe.model
        # Optimum's models are not modules, but contain one.
        inner = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"target.model is a {type(model).__name__}; expected a pipeline with a PyTorch model"
            )
        return (Root(inner, "transformers", (inner,)),)
    if isinstance(target, nn.Module) and isinstance(target, pretrained_models()):
        return (Root(target, "transformers", (target,)),)
    return None


def is_pipeline(target: object) -> bool:
    """Return whether `target` is a `Pipeline` of transformers."""
    return isinstance(target, loaded("transformers.pipelines.base", "Pipeline"))
