"""Message passing of HGTConv: attention over all types of edges at once. Hu et al. 2020, arXiv:2003.01332."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import HGTConv

from hf_cpu_accel.graph.propagate import adjacency_of, aggregate, is_small
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES, sddmm, segment_softmax


def hgt_propagate(
    conv: HGTConv, edge_index: Tensor, size: Any, k: Tensor, q: Tensor, v: Tensor, edge_attr: Any
) -> Tensor | None:
    """Compute the message passing of HGTConv.

    Args:
        edge_index: [2, E].
        q: [targets, heads, features of a head]; k and v: [sources, heads, features of a head].
        edge_attr: [E, heads], factors of the scores.

    Returns:
        [targets, features], or None if the kernels do not support the call.
    """
    if size is not None or is_small(edge_index, v.shape[1:].numel()) or v.dtype not in KERNEL_DTYPES:
        return None
    if not isinstance(edge_attr, Tensor) or edge_attr.shape != (edge_index.shape[1], q.shape[1]):
        return None
    adjacency = adjacency_of(conv, edge_index, len(q), len(k))
    if adjacency is None:
        return None
    scores = sddmm(adjacency.rowptr, adjacency.col, q.flatten(1), k.flatten(1), q.shape[1])
    factors = adjacency.sort(edge_attr) / math.sqrt(q.shape[2])
    alpha = segment_softmax(adjacency.rowptr, scores * factors.to(torch.float32))
    return aggregate(adjacency, v.flatten(1), "sum", alpha)
