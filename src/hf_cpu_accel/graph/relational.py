"""Forwards of RGCNConv: each relation is aggregated only for targets with edges, and only those rows are multiplied by its weight.

Schlichtkrull et al. 2018, arXiv:1703.06103.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import FastRGCNConv, RGCNConv

from hf_cpu_accel.graph.accepted_arguments import fits_size, takes
from hf_cpu_accel.graph.propagate import FastPropagate, adjacency_of
from hf_cpu_accel.graph.relations import Relations, relations
from hf_cpu_accel.ops.derivatives import needs_gradient
from hf_cpu_accel.ops.segment_matmul import segment_matmul
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES, spmm_reduce


@torch.compiler.disable(reason="the number of edges of a relation depends on data")
def rgcn(
    conv: RGCNConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_type: Tensor | None = None
) -> Any:
    """Compute RGCNConv; NotImplemented for calls that the kernels do not support."""
    output = _relational(conv, propagate, x, edge_index, edge_type)
    if output is NotImplemented:
        return output
    # The layer adds to zeros in the default dtype, which promotes the result.
    return output.to(torch.promote_types(torch.get_default_dtype(), output.dtype))


@torch.compiler.disable(reason="the number of edges of a relation depends on data")
def fast_rgcn(
    conv: FastRGCNConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_type: Tensor | None = None
) -> Any:
    """Compute FastRGCNConv; NotImplemented for calls that the kernels do not support."""
    if propagate.reduce not in ("sum", "mean"):
        return NotImplemented
    conv.fuse = False
    return _relational(conv, propagate, x, edge_index, edge_type)


def _relational(
    conv: RGCNConv, propagate: FastPropagate, x: Any, edge_index: Any, edge_type: Tensor | None
) -> Any:
    source, target = x if isinstance(x, tuple) else (x, x)
    if source is None:
        source = torch.arange(conv.in_channels_l)
        target = source if target is None else target
    reduce, embeds = propagate.reduce, not source.is_floating_point()
    if not takes(conv, edge_index) or not isinstance(edge_type, Tensor) or edge_type.dtype is not torch.int64:
        return NotImplemented
    if reduce is None:
        return NotImplemented
    if target.is_floating_point() == embeds or source.dim() != (1 if embeds else 2):
        return NotImplemented
    if conv.weight.dtype not in KERNEL_DTYPES or (not embeds and source.dtype is not conv.weight.dtype):
        return NotImplemented
    if conv.flow == "target_to_source" and len(source) != len(target):
        return (
            NotImplemented  # the layer passes its sizes as (source, target), which are reversed in this flow
        )
    if not fits_size(conv, edge_index, len(target), len(source)):
        return NotImplemented
    if edge_type.shape != edge_index.shape[1:] or (embeds and conv.num_blocks is not None):
        return NotImplemented
    adjacency = adjacency_of(conv, edge_index, len(target), len(source))
    if adjacency is None:
        return NotImplemented
    try:
        by_type = relations.get(adjacency, edge_type, conv.num_relations)
    except RuntimeError:  # types out of range: the layer ignores such edges, or raises its own error
        return NotImplemented
    messages = _embedded(conv, reduce, by_type, source) if embeds else _mapped(conv, reduce, by_type, source)
    addend = None if conv.root is None else conv.root[target] if embeds else target @ conv.root
    turned = by_type.by_pair() if needs_gradient(messages) else None
    return spmm_reduce(
        by_type.target_rowptr,
        by_type.target_pairs,
        None,
        messages,
        addend=addend,
        bias=conv.bias,
        transposed=turned,
    )


def _weight(conv: RGCNConv) -> Tensor:
    """Return the weights [relations, in, out], or [relations, blocks, in of a block, out of a block]."""
    if conv.num_bases is None:
        return conv.weight
    return (conv.comp @ conv.weight.flatten(1)).view(conv.num_relations, *conv.weight.shape[1:])


def _mapped(conv: RGCNConv, reduce: str, by_type: Relations, source: Tensor) -> Tensor:
    """Return the messages of the pairs, [pairs, out]."""
    turned = by_type.transposed() if needs_gradient(source) else None
    reduced = spmm_reduce(by_type.rowptr, by_type.col, None, source, reduce, transposed=turned)
    return segment_matmul(reduced, by_type.ends, _weight(conv))


def _embedded(conv: RGCNConv, reduce: str, by_type: Relations, nodes: Tensor) -> Tensor:
    """Return the messages of the pairs, [pairs, out], where x are node numbers: each relation has a row for every node."""
    weight = _weight(conv)
    row = by_type.relation * weight.shape[1] + nodes.index_select(0, by_type.col)
    return spmm_reduce(by_type.rowptr, row.int(), None, weight.flatten(0, 1), reduce)
