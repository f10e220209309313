"""Attention over the edges of a graph in one pass: scores, softmax over the edges of each row, and the weighted sum.

The graph is a CSR as in ops/sparse.py. No tensor has a row per edge: the scores of a row's edges stay in scratch memory. The
one-pass ops have no gradient. If autograd records one of their inputs, these functions compute the same from `sddmm`,
`segment_softmax` and `spmm_reduce`, which have gradients of any order.

    gat:           leaky_relu(source_score[j] + target_score[i])     Velickovic et al. 2018, arXiv:1710.10903
    gatv2:         <weight, leaky_relu(x[j] + target[i])>            Brody et al. 2022, arXiv:2105.14491
    dot_attention: <query[i], key[j]> * scale                        Shi et al. 2021, arXiv:2009.03509

`transposed` is the result of `csr_transpose`, used for the gradient; without it the backward pass computes it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.derivatives import needs_gradient, refuse_tangents
from hf_cpu_accel.ops.messages.messages import edge_messages
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.ops.sparse import Transposed, sddmm, segment_softmax, spmm_reduce
from hf_cpu_accel.ops.sparse_reference import row_of_edge, segment_softmax_reference, spmm_reduce_reference


def gat(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    source_score: Tensor,
    target_score: Tensor | None,
    negative_slope: float,
    *,
    transposed: Transposed | None = None,
) -> Tensor:
    """Compute the attention of GAT: the sum of x over the edges of each row, weighted by the softmax of their scores.

    Args:
        rowptr, col: the graph, int32 [M + 1] and [E].
        x: [N, H * C] float32 or bfloat16.
        source_score: [N, H], converted to float32.
        target_score: [M, H], converted to float32, or None for zeros.
        negative_slope: of the leaky ReLU of the scores.
        transposed: see above.

    Returns:
        [M, H * C], dtype of x; rows without edges are 0.
    """
    refuse_tangents("gat", x, source_score, target_score)
    if needs_gradient(x, source_score, target_score):
        weights = gat_weights(rowptr, col, source_score, target_score, negative_slope)
        return spmm_reduce(rowptr, col, weights, x, transposed=transposed)
    target = None if target_score is None else target_score.float().contiguous()
    return torch.ops.hf_cpu_accel.gat(
        rowptr, col, x, source_score.float().contiguous(), target, negative_slope
    )


def gat_weights(
    rowptr: Tensor,
    col: Tensor,
    source_score: Tensor,
    target_score: Tensor | None,
    negative_slope: float,
    edge_score: Tensor | None = None,
) -> Tensor:
    """Return the weights [E, H] float32 of the edges in `gat`; `edge_score` [E, H] is added to the scores."""
    scores = source_score.float().index_select(0, col)
    if target_score is not None:
        scores = scores + target_score.float().index_select(0, row_of_edge(rowptr, col.shape[0]))
    if edge_score is not None:
        scores = scores + edge_score
    return segment_softmax(rowptr, F.leaky_relu(scores, negative_slope))


def gatv2(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    negative_slope: float,
    *,
    transposed: Transposed | None = None,
) -> Tensor:
    """Compute the attention of GATv2: the sum of x over the edges of each row, weighted by the softmax of their scores.

    Args:
        rowptr, col: the graph, int32 [M + 1] and [E].
        x: [N, H * C] float32 or bfloat16.
        target: [M, H * C] in the dtype of x.
        weight: [H, C], converted to float32.
        negative_slope: of the leaky ReLU in the scores.
        transposed: see above.

    Returns:
        [M, H * C], dtype of x; rows without edges are 0.
    """
    refuse_tangents("gatv2", x, target, weight)
    if needs_gradient(x, target, weight):
        weights = gatv2_weights(rowptr, col, x, target, weight, negative_slope, transposed=transposed)
        return spmm_reduce(rowptr, col, weights, x, transposed=transposed)
    return torch.ops.hf_cpu_accel.gatv2(rowptr, col, x, target, weight.float().contiguous(), negative_slope)


def gatv2_weights(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    negative_slope: float,
    *,
    edge: Tensor | None = None,
    order: Tensor | None = None,
    transposed: Transposed | None = None,
) -> Tensor:
    """Return the weights [E, H] float32 of the edges in `gatv2`; `edge` [E', H * C] is added to x + target, see `edge_messages`."""
    scored = edge_messages(rowptr, col, x, target=target, edge=edge, order=order, transposed=transposed)
    by_head = F.leaky_relu(scored, negative_slope).view(-1, *weight.shape)
    return segment_softmax(rowptr, (by_head * weight).sum(dim=-1).float())


def dot_attention(
    rowptr: Tensor,
    col: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    scale: float,
    *,
    transposed: Transposed | None = None,
) -> Tensor:
    """Compute dot-product attention over the edges: the sum of value, weighted by the softmax of <query[i], key[j]> * scale.

    Args:
        rowptr, col: the graph, int32 [M + 1] and [E].
        query: [M, H * C] float32 or bfloat16.
        key, value: [N, H * C] in the dtype of query.
        heads: H.
        scale: factor of the scores.
        transposed: see above.

    Returns:
        [M, H * C], dtype of value; rows without edges are 0.
    """
    refuse_tangents("dot_attention", query, key, value)
    if needs_gradient(query, key, value):
        weights = segment_softmax(rowptr, sddmm(rowptr, col, query, key, heads) * scale)
        return spmm_reduce(rowptr, col, weights, value, transposed=transposed)
    return torch.ops.hf_cpu_accel.dot_attention(rowptr, col, query, key, value, heads, scale)


def _weighted(rowptr: Tensor, col: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    return spmm_reduce_reference(
        rowptr, col[: len(scores)], segment_softmax_reference(rowptr, scores), x, "sum"
    )


def gat_reference(
    rowptr: Tensor, col: Tensor, x: Tensor, source_score: Tensor, target_score: Tensor | None, slope: float
) -> Tensor:
    """Compute the op in PyTorch."""
    edges = int(rowptr[-1])
    scores = source_score.index_select(0, col[:edges])
    if target_score is not None:
        scores = scores + target_score.index_select(0, row_of_edge(rowptr, edges))
    return _weighted(rowptr, col, F.leaky_relu(scores, slope), x)


def gatv2_reference(
    rowptr: Tensor, col: Tensor, x: Tensor, target: Tensor, weight: Tensor, slope: float
) -> Tensor:
    """Compute the op in PyTorch."""
    edges = int(rowptr[-1])
    both = x.float().index_select(0, col[:edges])
    both = both + target.float().index_select(0, row_of_edge(rowptr, edges))
    scores = (F.leaky_relu(both, slope).view(edges, *weight.shape) * weight).sum(-1)
    return _weighted(rowptr, col, scores, x)


def dot_attention_reference(
    rowptr: Tensor, col: Tensor, query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float
) -> Tensor:
    """Compute the op in PyTorch."""
    edges = int(rowptr[-1])
    left = query.float().index_select(0, row_of_edge(rowptr, edges))
    products = left * key.float().index_select(0, col[:edges])
    scores = products.view(edges, heads, value.shape[1] // heads).sum(-1) * scale
    return _weighted(rowptr, col, scores, value)


def _rows_fake(rowptr: Tensor, col: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


declare(
    "gat(Tensor rowptr, Tensor col, Tensor x, Tensor source_score, Tensor? target_score, float slope) -> Tensor",
    fake=_rows_fake,
    reference=gat_reference,
)
declare(
    "gatv2(Tensor rowptr, Tensor col, Tensor x, Tensor target, Tensor weight, float slope) -> Tensor",
    fake=_rows_fake,
    reference=gatv2_reference,
)
declare(
    "dot_attention(Tensor rowptr, Tensor col, Tensor query, Tensor key, Tensor value, SymInt heads, float scale) -> Tensor",
    fake=lambda rowptr, col, query, key, value, *_: _rows_fake(rowptr, col, value),
    reference=dot_attention_reference,
)
