"""Pipelines and models of transformers."""

from __future__ import annotations

from torch import nn
from transformers import Pipeline, PreTrainedModel

from hf_cpu_accel.hosts.find import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """The model of a pipeline, or the model itself; None if `target` is not of transformers.

    Raises:
        TypeError: a pipeline without a torch model.
    """
    if isinstance(target, Pipeline):
        model = target.model
        # Optimum's models are no modules, but hold one.
        inner = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"target.model is a {type(model).__name__}; accepted: a pipeline with a torch model"
            )
        return (Root(inner, "transformers", (inner,)),)
    if isinstance(target, PreTrainedModel):
        return (Root(target, "transformers", (target,)),)
    return None
