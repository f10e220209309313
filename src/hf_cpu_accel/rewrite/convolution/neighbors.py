"""Neighboring blocks of convolutions, as in MobileNet of transformers (Howard et al. 2017, arXiv:1704.04861): a loop of their
model calls each, and all run in one call when the output of the last is read.

Next to others a single convolution counts as a block, too: calling it takes as long as its arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.folded_norm import STRUCTURE as NORM
from hf_cpu_accel.rewrite.convolution.links import AffineLink
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


def join_neighbors(context: Context) -> list[PlanItem]:
    """Make blocks in one list, and those next to it, wait for one another. Call it after blocks of several convolutions are
    fused."""
    single = {
        id(module)
        for group in _groups(context.root)
        for module in group
        if not isinstance(module, FusedResidualBlock)
    }

    def look(layer: nn.Module, path: str, context: Context) -> FusedResidualBlock | Refusal | None:
        return chain_of(layer, path, context, fewest=1) if id(layer) in single else None

    items = fuse_each(
        context, STRUCTURE, look, op_and_dtype, skip_children=True, expected=lambda root, path: False
    )
    for group in _groups(context.root):
        blocks = [module for module in group if isinstance(module, FusedResidualBlock)]
        for block in blocks:  # values narrower than float32 between them would depend on their readers
            block._defers = len(blocks) > 1 and not block.narrow
    return [*items, *_norms_of_chains(context)]


def _norms_of_chains(context: Context) -> list[PlanItem]:
    """Return the rows of norms that chains compute, in place of the rows that no convolution includes them."""
    blocks = [
        (path, part) for path, part in context.root.named_modules() if isinstance(part, FusedResidualBlock)
    ]
    links = ((path, link) for path, block in blocks for link in block._chain if isinstance(link, AffineLink))
    paths = [f"{path}.{link.path}" for path, link in links]
    told = frozenset(paths)
    context.results.items[:] = [
        item for item in context.results.items if item.reason is None or item.name not in told
    ]
    return [PlanItem(path, NORM, "convolutions", "float32", packed_bytes=0, reason=None) for path in paths]


def _groups(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield blocks, or modules that may become one, that follow each other in a list; and those next to a list."""
    if isinstance(module, FusedResidualBlock):
        return
    children = list(module.children())
    lists = [module] if isinstance(module, nn.Sequential) else _lists_in(children)
    runs = [run for some in lists for run in _runs(some)]
    beside = [child for child in children if module not in lists and runs and _may_be_block(child)]
    group = [*itertools.chain.from_iterable(runs), *beside]
    if not all(map(_is_linear, group)):
        yield group
    for child in children:
        yield from _groups(child)


def _lists_in(children: list[nn.Module]) -> list[nn.Module]:
    return [child for child in children if isinstance(child, nn.ModuleList)]


def _runs(modules: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield runs of several blocks without other modules between them."""
    for is_block, run in itertools.groupby(modules.children(), _may_be_block):
        blocks = list(run)
        if is_block and len(blocks) > 1:
            yield blocks


def _may_be_block(module: nn.Module) -> bool:
    """Return whether the module is a block, or has a single convolution: larger modules were matched before."""
    if isinstance(module, FusedResidualBlock):
        return True
    return may_be_chain(module, fewest=1) and not may_be_chain(module, fewest=2)


def _is_linear(block: nn.Module) -> bool:
    """Return whether all its convolutions are linears, for which other providers may be faster."""
    parts = [part for part in block.modules() if isinstance(part, DeferringConvolution)]
    return all(isinstance(part, PackedLinear) for part in parts)
