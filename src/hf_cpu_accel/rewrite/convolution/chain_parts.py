"""Modules that may be links of a chain: convolutions, poolings, and norms before convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.guard.modules import instance_forward
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution


def parts_of(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in `layer` that may be links of a chain, by path."""
    return {path: part for path, part in layer.named_modules() if is_part(part)}


def is_part(module: nn.Module) -> bool:
    """Return whether the module may be a link of a chain."""
    return is_of_images(module) or is_pooling(module) or is_norm(module)


def is_of_images(module: nn.Module) -> bool:
    """Return whether the module is a 2-d convolution that may wait for the ops that follow."""
    return isinstance(module, DeferringConvolution) and len(module.kernel_size) == 2


def is_pooling(module: nn.Module) -> bool:
    """Return whether the module is a pooling that the op supports, with the original forward."""
    if instance_forward(module) is not None:
        return False
    if type(module) is nn.AvgPool2d:
        return not module.ceil_mode and module.divisor_override is None
    if type(module) is not nn.MaxPool2d:
        return False
    return not (module.ceil_mode or module.return_indices) and _are_one(module.dilation)


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is a batch norm with fixed statistics that is not folded into a convolution."""
    cls: Any = type(module)
    if not isinstance(module, nn.BatchNorm2d) or cls.forward is not nn.BatchNorm2d.forward:
        return False
    return not module.training and module.running_mean is not None and instance_forward(module) is None


def gain_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset of the norm for each channel, float32."""
    gain = torch.rsqrt(norm.running_var.double() + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight.detach().double()
    shift = -gain * norm.running_mean.double()
    shift = shift if norm.bias is None else shift + norm.bias.detach().double()
    return gain.float(), shift.float()


def _are_one(sizes: int | tuple[int, ...]) -> bool:
    return all(size == 1 for size in ((sizes,) if isinstance(sizes, int) else sizes))
