"""Ops that may follow a convolution in the same call: a batch norm, a residual, an activation."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Epilogue(NamedTuple):
    """activation(norm(convolution) + residual), with the parts that are present.

    Attributes:
        normalized: whether the convolution's norm is applied.
        activation: one of `ops.linear.ACTIVATIONS`.
    """

    normalized: bool = False
    residual: Tensor | None = None
    activation: str = "none"


PLAIN = Epilogue()
NORMALIZED = Epilogue(normalized=True)

# Slopes below zero (Maas et al. 2013), and the activations of `ops.linear.ACTIVATIONS` that have them.
_SLOPES = {0.01: "leaky_relu", 0.1: "leaky_relu_tenth"}


def leaky_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the activation that ATen's leaky_relu computes with these arguments, or None for other slopes."""
    slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
    return _SLOPES.get(slope) if isinstance(slope, float) else None
