"""References of the ops of ops/sparse.py in PyTorch. Differentiable; in float64 for float64 inputs, else in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def row_of_edge(rowptr: Tensor, edges: int) -> Tensor:
    """Return the row of each entry, int64 [edges]; the last row for entries of no row."""
    rows = rowptr.shape[0] - 1
    if rows == 0:
        return torch.zeros(edges, dtype=torch.long)
    counts = rowptr.diff().long()
    counts[-1] += edges - rowptr[-1]
    return torch.repeat_interleave(torch.arange(rows), counts, output_size=edges)


def coo_to_csr_reference(
    row: Tensor, col: Tensor, rows: int, cols: int, loops: int, order: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in PyTorch."""
    row, col = row.long(), col.long()
    edges, added = len(row), max(loops, 0)
    if edges and (min(row.min(), col.min()) < 0 or row.max() >= rows or col.max() >= cols):
        raise RuntimeError(
            "hf_cpu_accel::coo_to_csr: an index is negative or out of range: "
            f"row must be below {rows} and col below {cols}"
        )
    remaining = torch.arange(edges) if loops < 0 else (row != col).nonzero().view(-1)
    nodes = torch.arange(added)
    row, col, origin = (
        torch.cat([old, new])
        for old, new in ((row[remaining], nodes), (col[remaining], nodes), (remaining, nodes + edges))
    )
    by_row = torch.argsort(row, stable=True)
    rowptr = torch.zeros(rows + 1, dtype=torch.int32)
    rowptr[1:] = torch.bincount(row, minlength=rows)[:rows].cumsum(0)
    rest = torch.zeros(edges + added - len(row), dtype=torch.long)
    sources = torch.cat([col[by_row], rest]).int()
    return rowptr, sources, torch.cat([origin[by_row], rest]).int() if order else sources.new_empty(0)


def csr_transpose_reference(rowptr: Tensor, col: Tensor, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in PyTorch."""
    edges = int(rowptr[-1])
    row = row_of_edge(rowptr, edges)
    transposed = coo_to_csr_reference(col[:edges], row, cols, rowptr.shape[0] - 1, -1, True)
    rest = col.new_zeros(len(col) - edges)
    return transposed[0], torch.cat([transposed[1], rest]), torch.cat([transposed[2], rest])


def spmm_reduce_reference(
    rowptr: Tensor,
    col: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    reduce: str,
    addend: Tensor | None = None,
    addend_scale: float = 1.0,
    bias: Tensor | None = None,
    *_: Tensor | None,
) -> Tensor:
    """Compute the op in PyTorch."""
    compute = x.dtype if x.dtype is torch.float64 else torch.float32
    rows, features = rowptr.shape[0] - 1, x.shape[1]
    edges = int(rowptr[-1])
    _check_graph(rowptr, col, x.shape[0])
    row = row_of_edge(rowptr, edges)
    messages = x[:edges] if col is None else x.index_select(0, col[:edges])
    messages = messages.to(compute)
    if value is not None:
        heads = 1 if value.dim() == 1 else value.shape[1]
        weights = value[:edges].to(compute).reshape(edges, heads, 1)
        messages = (messages.reshape(edges, heads, features // heads) * weights).reshape(edges, features)
    output = messages.new_zeros(rows, features)
    if reduce in ("sum", "mean"):
        output = output.index_add(0, row, messages)
        if reduce == "mean":
            output = output / rowptr.diff().clamp(min=1).unsqueeze(1)
    elif edges:
        index = row.unsqueeze(1).expand(-1, features)
        # Zeros to begin with would count as one more tie where the extreme is 0, even with include_self=False.
        bound = torch.full_like(output, float("inf") if reduce == "min" else float("-inf"))
        extreme = bound.scatter_reduce(0, index, messages, f"a{reduce}")
        output = torch.where((rowptr.diff() > 0).unsqueeze(1), extreme, output)
    if addend is not None:
        output = output + addend_scale * addend.to(compute)
    if bias is not None:
        output = output + bias.to(compute)
    return output.to(x.dtype).contiguous()


def _check_graph(rowptr: Tensor, col: Tensor | None, sources: int) -> None:
    entries = sources if col is None else col.shape[0]
    used = col[: int(rowptr[-1])] if col is not None else None
    ordered = bool((rowptr.diff() >= 0).all()) and int(rowptr[0]) >= 0 and int(rowptr[-1]) <= entries
    if not ordered or (
        used is not None and len(used) and (int(used.min()) < 0 or int(used.max()) >= sources)
    ):
        raise RuntimeError(
            "hf_cpu_accel: rowptr must not decrease or exceed the length of col, and col must index rows that exist"
        )


def spmm_extreme_reference(
    rowptr: Tensor, col: Tensor | None, value: Tensor | None, x: Tensor, reduce: str, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the op in PyTorch."""
    output = spmm_reduce_reference(rowptr, col, value, x, reduce)
    edges = int(rowptr[-1])
    row = row_of_edge(rowptr, edges)
    messages = (x[:edges] if col is None else x.index_select(0, col[:edges])).float()
    if value is not None:
        messages = messages * value[:edges].reshape(edges, 1)
    reached = (messages == output.float().index_select(0, row)).float()
    return output, torch.zeros(output.shape).index_add(0, row, reached).clamp_(min=1)


def spmm_extreme_backward_reference(
    t_rowptr: Tensor, t_col: Tensor, t_value: Tensor | None, x: Tensor, output: Tensor, grad: Tensor
) -> Tensor:
    """Compute the op in PyTorch."""
    edges = int(t_rowptr[-1])
    source, target = row_of_edge(t_rowptr, edges), t_col[:edges]
    weight = torch.ones(edges, 1) if t_value is None else t_value[:edges].reshape(edges, 1)
    products = x.float().index_select(0, source) * weight
    reached = products == output.float().index_select(0, target)
    parts = torch.where(reached, grad.float().index_select(0, target), 0.0) * weight
    return torch.zeros(x.shape).index_add(0, source, parts).to(x.dtype)


def sddmm_reference(rowptr: Tensor, col: Tensor | None, a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Compute the op in PyTorch."""
    edges, features = (b if col is None else col).shape[0], b.shape[1]
    used = int(rowptr[-1])
    left = a.index_select(0, row_of_edge(rowptr, used)).float()
    right = (b[:used] if col is None else b.index_select(0, col[:used])).float()
    dots = (left * right).reshape(used, heads, features // heads).sum(-1)
    return torch.cat([dots, dots.new_zeros(edges - used, heads)])


def segment_softmax_reference(rowptr: Tensor, scores: Tensor) -> Tensor:
    """Compute the op in PyTorch."""
    used, rows = int(rowptr[-1]), rowptr.shape[0] - 1
    row, inside = row_of_edge(rowptr, used), scores[:used]
    index = row.unsqueeze(1).expand_as(inside)
    largest = inside.new_zeros(rows, scores.shape[1])
    if used:
        largest = largest.scatter_reduce(0, index, inside.detach(), "amax", include_self=False)
    powers = (inside - largest.index_select(0, row)).exp()
    sums = torch.zeros_like(largest).index_add(0, row, powers) + 1e-16
    softmax = powers / sums.index_select(0, row)
    return torch.cat([softmax, softmax.new_zeros(len(scores) - used, scores.shape[1])])


def segment_softmax_backward_reference(rowptr: Tensor, softmax: Tensor, grad: Tensor) -> Tensor:
    """Compute the op in PyTorch."""
    used, rows = int(rowptr[-1]), rowptr.shape[0] - 1
    row = row_of_edge(rowptr, used)
    inner = softmax.new_zeros(rows, softmax.shape[1]).index_add(0, row, (softmax * grad)[:used])
    inside = softmax[:used] * (grad[:used] - inner.index_select(0, row))
    return torch.cat([inside, inside.new_zeros(len(softmax) - used, softmax.shape[1])])
