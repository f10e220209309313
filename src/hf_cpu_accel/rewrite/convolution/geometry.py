"""Recognize convolutions of torch, and compute their padding."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

from torch import nn

from hf_cpu_accel.rewrite.core.context import Context

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
C = TypeVar("C", nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Channels of intrinsic features in GhostNet (Han et al. 2020, arXiv:1911.11907).
_FEWEST = 8


def is_convolution(module: nn.Module, kind: type[C]) -> TypeGuard[C]:
    """Return whether the module computes the same as torch's convolution of this kind. Hosts have subclasses that differ in
    their construction only (depthwise convolutions of EfficientNet)."""
    cls: Any = type(module)
    return (
        isinstance(module, kind) and cls.forward is kind.forward and cls._conv_forward is kind._conv_forward
    )


def symmetric_padding(module: Convolution) -> tuple[int, ...] | None:
    """Return the zeros on either side of each dimension, or None if one side has one more (`padding="same"` with an even
    kernel)."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    reach = [step * (size - 1) for step, size in zip(module.dilation, module.kernel_size, strict=True)]
    return None if any(cells % 2 for cells in reach) else tuple(cells // 2 for cells in reach)


def joins_chain(module: nn.Module, context: Context) -> bool:
    """Return whether a convolution of few channels runs in a chain with the ops around it, where the share of padding in a panel
    does not matter."""
    if not isinstance(module, nn.Conv2d):
        return False
    normalized = module.out_channels >= _FEWEST and id(module) in context.norms_after
    return normalized or _squeezes(module, context)


def _squeezes(module: nn.Conv2d, context: Context) -> bool:
    """Return whether the convolution is the first of two pointwise ones that gate channels (Hu et al. 2018, arXiv:1709.01507).
    However few channels are between them, the two run in the chain around them."""
    if tuple(module.kernel_size) != (1, 1):
        return False
    siblings = [child for parent, _ in context.tree.slots[id(module)] for child in parent.children()]
    turned = ((1, 1), module.out_channels, module.in_channels)
    # Other convolutions may be replaced already.
    names = ("kernel_size", "in_channels", "out_channels")
    told = (tuple(getattr(other, name, None) for name in names) for other in siblings if other is not module)
    return turned in told
