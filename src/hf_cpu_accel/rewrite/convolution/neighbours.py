"""Blocks of convolutions that stand beside one another, as in transformers' MobileNet (Howard et al. 2017, arXiv:1704.04861): a loop
of their model calls each, and all are computed in one call when what the last has made is read.

Beside others a single convolution counts as a block, too: to call it takes as long as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.residual_block import (
    STRUCTURE,
    FusedResidualBlock,
    chain_of,
    may_be_chain,
    op_and_dtype,
)
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


def join_neighbours(context: Context) -> list[PlanItem]:
    """Have blocks in one list, and those beside that, wait for one another. To be called when blocks of several convolutions are
    fused."""
    single = {
        id(module)
        for group in _groups(context.root)
        for module in group
        if not isinstance(module, FusedResidualBlock)
    }

    def look(layer: nn.Module, path: str, context: Context) -> FusedResidualBlock | Refusal | None:
        return chain_of(layer, path, context, fewest=1) if id(layer) in single else None

    items = fuse_each(context, STRUCTURE, look, op_and_dtype, whole=True, expected=lambda root, path: False)
    for group in _groups(context.root):
        blocks = [module for module in group if isinstance(module, FusedResidualBlock)]
        for block in blocks:  # numbers of less than float32 between them would depend on who reads them
            block._defers = len(blocks) > 1 and not block.narrow
    return items


def _groups(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Blocks, or what may become one, beside each other: two of them at least."""
    if isinstance(module, FusedResidualBlock):
        return
    children = list(module.children())
    lists = [child for child in children if isinstance(child, nn.ModuleList)]
    inside = [part for some in lists for part in some.children() if _may_be_block(part)]
    beside = [child for child in children if _may_be_block(child)]
    group = [*inside, *beside]
    together = len(inside) > 1 or (isinstance(module, nn.Sequential) and len(beside) > 1)
    if together and not all(map(_is_linear, group)):
        yield group
    for child in children:
        yield from _groups(child)


def _may_be_block(module: nn.Module) -> bool:
    return isinstance(module, FusedResidualBlock) or may_be_chain(module, fewest=1)


def _is_linear(block: nn.Module) -> bool:
    """Whether all its convolutions are: other providers may be faster for those."""
    parts = [part for part in block.modules() if isinstance(part, DeferringConvolution)]
    return all(isinstance(part, PackedLinear) for part in parts)
