"""Ops on graphs in compressed sparse rows (CSR): conversion from coordinates, SpMM with reductions (spmm_reduce), SDDMM and
softmax.

Row i of a CSR is a target node. Its entries e in [rowptr[i], rowptr[i + 1]) are the edges that point to it, and col[e] is the
source of edge e. rowptr and col are int32. col may be longer than rowptr[-1]; the entries beyond belong to no row. (`coo_to_csr`
does not know in advance how many self-loops it removes, and output shapes must be traceable.)

Features are float32 or bfloat16, sums and edge values are float32. Results do not depend on the number of threads. All ops are
differentiable in reverse mode, any number of times. Min and max divide their gradient evenly among ties, as scatter_reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.abi import REDUCTIONS
from hf_cpu_accel.ops.derivatives import needs_gradient, refuse_tangents
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.ops.sparse_reference import (
    coo_to_csr_reference,
    csr_transpose_reference,
    sddmm_reference,
    segment_softmax_backward_reference,
    segment_softmax_reference,
    spmm_extreme_backward_reference,
    spmm_extreme_reference,
    spmm_reduce_reference,
)

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
Transposed = tuple[Tensor, Tensor, Tensor]


def coo_to_csr(
    row: Tensor, col: Tensor, rows: int, cols: int, *, loops: int = -1, order: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert edges to CSR with a parallel stable sort by row, in O(edges + rows).

    Args:
        row, col: [E] int64 or int32, targets below `rows` and sources below `cols`.
        rows, cols: the number of targets and of sources.
        loops: -1 does not change the edges. Otherwise all self-loops are removed, and one loop (i, i) is appended to each row
            i < loops.
        order: whether to return `order`.

    Returns:
        rowptr [rows + 1], col [E + max(loops, 0)], and order of the same length as col: entry e was edge order[e], and the loop of
        row i is E + i. order is empty unless requested. All are int32.

    Raises:
        RuntimeError: an index is negative or out of range.
    """
    return torch.ops.hf_cpu_accel.coo_to_csr(row, col, rows, cols, loops, order)


def csr_transpose(rowptr: Tensor, col: Tensor, cols: int) -> Transposed:
    """Return the CSR of the transposed matrix.

    Args:
        rowptr, col: int32 [rows + 1] and [E].
        cols: the number of columns.

    Returns:
        t_rowptr [cols + 1], t_col [E], the rows of the entries, and t_order [E]: entry e was entry t_order[e]. All are int32.
    """
    return torch.ops.hf_cpu_accel.csr_transpose(rowptr, col, cols)


def spmm_reduce(
    rowptr: Tensor,
    col: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    reduce: str = "sum",
    *,
    addend: Tensor | None = None,
    addend_scale: float = 1.0,
    bias: Tensor | None = None,
    transposed: Transposed | None = None,
) -> Tensor:
    """Multiply a sparse by a dense matrix with a reduction (SpMM): reduce the messages of the edges of each row.

    output[i] = (reduce over e in row i of value[e] * x[col[e]]) + addend_scale * addend[i] + bias

    Args:
        rowptr: [M + 1] int32.
        col: [E] int32 below N; None where edge e reads row e of x (a segment reduction).
        value: [E], or [E, H] for H heads of K / H features, or None for ones. Converted to float32.
        x: [N, K], any strides, float32 or bfloat16. PyTorch computes float64 and float16.
        reduce: "sum", "mean" (divided by the number of edges), "min" or "max"; rows without edges give 0.
        addend: [M, K] in the dtype of x, added after the reduction, or None.
        addend_scale: factor of `addend`.
        bias: [K], or None.
        transposed: from `csr_transpose`, for the gradient; without it the backward pass computes it.

    Returns:
        [M, K] contiguous, dtype of x.

    Raises:
        ValueError: the shapes do not fit, or the reduction is unknown.
        RuntimeError: an index in rowptr or col is out of range, or an input has a forward-mode tangent.
    """
    _check(rowptr, col, value, x, reduce, addend, bias)
    refuse_tangents("spmm_reduce", value, x, addend, bias)
    if x.dtype not in KERNEL_DTYPES:
        return spmm_reduce_reference(rowptr, col, value, x, reduce, addend, addend_scale, bias)
    value = None if value is None else value.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    t_arguments = transposed or (None, None, None)
    if reduce in ("min", "max"):
        if value is not None and (x.dtype is not torch.float32 or value.dim() == 2):
            # Rare: products in bfloat16 would be rounded before ties are compared, and each head would need its own ties.
            output = _extreme_of_messages(rowptr, col, value, x, reduce)
            return _add(output, addend, addend_scale, bias)
        if needs_gradient(value, x, addend, bias):
            output = torch.ops.hf_cpu_accel.spmm_extreme(rowptr, col, value, x, reduce, *t_arguments)[0]
            return _add(output, addend, addend_scale, bias)
    return torch.ops.hf_cpu_accel.spmm_reduce(
        rowptr, col, value, x, reduce, addend, addend_scale, bias, *t_arguments
    )


def sddmm(rowptr: Tensor, col: Tensor | None, a: Tensor, b: Tensor, heads: int = 1) -> Tensor:
    """Compute the dot product <a[i], b[col[e]]> for each edge e of row i, per head (SDDMM).

    Args:
        rowptr, col: the graph; col None where edge e reads row e of b.
        a: [M, K] float32 or bfloat16.
        b: [N, K] in the dtype of a.
        heads: H, which divides K.

    Returns:
        [E, H] float32; entries of no row are 0.

    Raises:
        RuntimeError: the shapes do not fit, an index is out of range, or an input has a forward-mode tangent.
    """
    refuse_tangents("sddmm", a, b)
    return torch.ops.hf_cpu_accel.sddmm(rowptr, col, a, b, heads)


def segment_softmax(rowptr: Tensor, scores: Tensor) -> Tensor:
    """Compute the softmax of scores [E, H] float32 over the edges of each row.

    1e-16 is added to the sums, as in PyTorch Geometric. Entries of no row are 0.
    """
    refuse_tangents("segment_softmax", scores)
    return torch.ops.hf_cpu_accel.segment_softmax(rowptr, scores.contiguous())


def _check(
    rowptr: Tensor,
    col: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    reduce: str,
    addend: Tensor | None,
    bias: Tensor | None,
) -> None:
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r}: expected one of {', '.join(REDUCTIONS)}")
    if x.dim() != 2:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected [nodes, features]")
    edges, features, rows = (x if col is None else col).shape[0], x.shape[1], rowptr.shape[0] - 1
    if value is not None and (
        value.dim() not in (1, 2)
        or value.shape[0] != edges
        or (value.dim() == 2 and (value.shape[1] == 0 or features % value.shape[1] != 0))
    ):
        raise ValueError(
            f"value of shape {tuple(value.shape)}: expected [{edges}], or [{edges}, heads] with heads that divide {features}"
        )
    if addend is not None and addend.shape != (rows, features):
        raise ValueError(f"addend of shape {tuple(addend.shape)}: expected {(rows, features)}")
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"bias of shape {tuple(bias.shape)}: expected ({features},)")


def _add(output: Tensor, addend: Tensor | None, addend_scale: float, bias: Tensor | None) -> Tensor:
    if addend is not None:
        output = output + addend_scale * addend
    return output if bias is None else output + bias.to(output.dtype)


def _extreme_of_messages(rowptr: Tensor, col: Tensor | None, value: Tensor, x: Tensor, reduce: str) -> Tensor:
    sources = x if col is None else x.index_select(0, col)
    heads = 1 if value.dim() == 1 else value.shape[1]
    messages = (sources.float().view(len(sources), heads, -1) * value.view(len(sources), heads, 1)).flatten(1)
    return spmm_reduce(rowptr, None, None, messages, reduce).to(x.dtype)


def _csr_fake(
    row: Tensor, col: Tensor, rows: int, cols: int, loops: int, order: bool
) -> tuple[Tensor, Tensor, Tensor]:
    entries = row.shape[0] + max(loops, 0)
    sizes = (rows + 1, entries, entries if order else 0)
    rowptr, sources, orders = (row.new_empty(size, dtype=torch.int32) for size in sizes)
    return rowptr, sources, orders


def _transpose_fake(rowptr: Tensor, col: Tensor, cols: int) -> Transposed:
    return rowptr.new_empty(cols + 1), torch.empty_like(col), torch.empty_like(col)


def _rows_fake(rowptr: Tensor, col: Tensor | None, value: Tensor | None, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


def _extreme_fake(
    rowptr: Tensor, col: Tensor | None, value: Tensor | None, x: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    shape = rowptr.shape[0] - 1, x.shape[1]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.float32)


def _sddmm_fake(rowptr: Tensor, col: Tensor | None, a: Tensor, b: Tensor, heads: int) -> Tensor:
    return b.new_empty((b if col is None else col).shape[0], heads, dtype=torch.float32)


declare(
    "coo_to_csr(Tensor row, Tensor col, SymInt rows, SymInt cols, SymInt loops, bool order) -> (Tensor, Tensor, Tensor)",
    fake=_csr_fake,
    reference=coo_to_csr_reference,
)
declare(
    "csr_transpose(Tensor rowptr, Tensor col, SymInt cols) -> (Tensor, Tensor, Tensor)",
    fake=_transpose_fake,
    reference=csr_transpose_reference,
)
declare(
    "spmm_reduce(Tensor rowptr, Tensor? col, Tensor? value, Tensor x, str reduce, Tensor? addend, float addend_scale, "
    "Tensor? bias, Tensor? t_rowptr, Tensor? t_col, Tensor? t_order) -> Tensor",
    fake=_rows_fake,
    reference=spmm_reduce_reference,
)
declare(
    "spmm_extreme(Tensor rowptr, Tensor? col, Tensor? value, Tensor x, str reduce, Tensor? t_rowptr, Tensor? t_col, "
    "Tensor? t_order) -> (Tensor, Tensor)",
    fake=_extreme_fake,
    reference=spmm_extreme_reference,
)
declare(
    "spmm_extreme_backward(Tensor t_rowptr, Tensor t_col, Tensor? t_value, Tensor x, Tensor output, Tensor grad) -> Tensor",
    fake=lambda t_rowptr, t_col, t_value, x, output, grad: x.new_empty(x.shape),
    reference=spmm_extreme_backward_reference,
)
declare(
    "sddmm(Tensor rowptr, Tensor? col, Tensor a, Tensor b, SymInt heads) -> Tensor",
    fake=_sddmm_fake,
    reference=sddmm_reference,
)
declare(
    "segment_softmax(Tensor rowptr, Tensor scores) -> Tensor",
    fake=lambda rowptr, scores: scores.new_empty(scores.shape),
    reference=segment_softmax_reference,
)
declare(
    "segment_softmax_backward(Tensor rowptr, Tensor softmax, Tensor grad) -> Tensor",
    fake=lambda rowptr, softmax, grad: softmax.new_empty(softmax.shape),
    reference=segment_softmax_backward_reference,
)
