"""Find places where a fused layer would be expected, by the number of linears in a module."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel.rewrite.attention.multihead import PackedMultiheadAttention
from hf_cpu_accel.rewrite.core.refusal import is_listed
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

# Linears of attention alone (query, key, value, output): a module in a list with as many is a transformer layer.
_ATTENTION = 4


def is_layer(root: nn.Module, path: str) -> bool:
    """Return whether the module is a transformer layer in a list of layers, by its linears, and contains no such list itself."""
    if not is_listed(root, path):
        return False
    layer = root.get_submodule(path)
    inside = (part for below, part in layer.named_modules() if below.rpartition(".")[2].isdigit())
    return _attends(layer) and not any(map(_attends, inside))


def _attends(module: nn.Module) -> bool:
    return sum(map(_linears, module.modules())) >= _ATTENTION


def _linears(module: nn.Module) -> int:
    """Return the number of linears that the module itself stands for."""
    if isinstance(module, PackedMultiheadAttention):
        return len(module.group.ranges)
    return isinstance(module, PackedLinear) and not hasattr(module, "kernel_size")
