"""Map ATen ops on images to the steps of a chain of convolutions."""

from __future__ import annotations

from typing import Any

import torch

from hf_cpu_accel.rewrite.convolution.epilogue import leaky_name
from hf_cpu_accel.rewrite.convolution.links import Zeros

_ATEN = torch.ops.aten
PRODUCTS = (_ATEN.mul.Tensor, _ATEN.mul_.Tensor)
COMBINING = (_ATEN.add.Tensor, _ATEN.add_.Tensor, *PRODUCTS)
_ACTIVATIONS: dict[Any, str] = {
    getattr(_ATEN, name + ending).default: name
    for name in ("relu", "silu", "hardswish", "sigmoid", "hardsigmoid", "tanh")
    for ending in ("", "_")
}


def activation_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the activation that `func` computes of its first argument, or None."""
    if func in (_ATEN.hardtanh.default, _ATEN.hardtanh_.default):
        return "relu6" if args[1:] == (0, 6) and not kwargs else None
    if func is _ATEN.gelu.default:
        return {"none": "gelu", "tanh": "gelu_tanh"}[kwargs.get("approximate", "none")]
    if func in (_ATEN.leaky_relu.default, _ATEN.leaky_relu_.default):
        return leaky_name(args, kwargs)
    return _ACTIVATIONS.get(func) if len(args) == 1 and not kwargs else None


def is_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `func` computes the mean of all pixels of an image, as an image of one pixel."""
    if func is _ATEN.mean.dim:
        return len(args) == 3 and sorted(d % 4 for d in args[1]) == [2, 3] and args[2] is True and not kwargs
    return func is _ATEN._adaptive_avg_pool2d.default and list(args[1]) == [1, 1]


def names_strides(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `func` marks an image of one pixel as channels last, as torch does after its own pooling."""
    if func is not _ATEN.as_strided_.default or len(args) != 3:
        return False
    image, sizes, strides = args
    return list(sizes) == [*image.shape[:2], 1, 1] and list(strides[:2]) == [image.shape[1], 1]


def zeros_around(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Zeros | None:
    """Return the zeros that `func` puts around its first argument, or None if it does anything else."""
    if func is not _ATEN.constant_pad_nd.default:
        return None
    sides = list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if value != 0 or len(sides) not in (2, 4) or min(sides) < 0:
        return None
    left, right, top, bottom = [*sides, 0, 0][:4]
    return Zeros(top, bottom, left, right)
