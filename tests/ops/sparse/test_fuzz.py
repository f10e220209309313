"""Random graphs, good and bad, through every op of ops/sparse.py and ops/graph_attention.py, against the references.

Good input must give what the reference gives, NaN and infinity included; bad input must raise. 2,000 cases in the suite;
`make fuzz` runs 10,000, and `make asan` runs them with kernels that AddressSanitizer watches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops import graph_attention as attention
from hf_cpu_accel.ops import sparse
from hf_cpu_accel.ops import sparse_reference as reference

SUITE_CASES = 2000
ERRORS = (RuntimeError, ValueError, IndexError)
FAR = (-(2**31), -7, -1, 2**30, 2**31 - 1)


@dataclass
class Case:
    """A graph with features; `bad` says what is wrong with it."""

    rng: random.Random
    rowptr: Tensor
    col: Tensor
    targets: int
    sources: int
    heads: int
    width: int
    dtype: torch.dtype
    bad: str | None = None

    def features(self, rows: int) -> Tensor:
        """[rows, heads * width], in one of the layouts that callers have, with a few NaN and infinities."""
        width = self.heads * self.width
        x = torch.randn(rows, width)
        if self.rng.random() < 0.2 and x.numel():
            flat = x.view(-1)
            for special in (torch.nan, torch.inf, -torch.inf, 0.0):
                flat[self.rng.randrange(len(flat))] = special
        layout = self.rng.randrange(4)
        if layout == 1:
            x = torch.cat([x, x], dim=1)[:, :width]
        elif layout == 2:
            x = x.t().contiguous().t()
        elif layout == 3:
            x = torch.stack([x, x], dim=2)[:, :, 0]
        return x.to(self.dtype)


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    targets, sources, edges = (rng.choice((0, 1, 2, rng.randrange(3, 60))) for _ in range(3))
    if not (targets and sources):
        edges = 0
    target = torch.randint(0, max(targets, 1), (edges,))
    if edges and rng.random() < 0.3:
        target[: edges // 2] = target[0]
    rowptr, col, _ = sparse.coo_to_csr(target, torch.randint(0, max(sources, 1), (edges,)), targets, sources)
    heads = rng.choice((1, 1, 2, 3, 4))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    case = Case(rng, rowptr, col, targets, sources, heads, rng.choice((1, 2, 7, 16, 17, 33)), dtype)
    if rng.random() < 0.3:
        _spoil(case)
    return case


def _spoil(case: Case) -> None:
    """Break the graph in one place that some row refers to."""
    kind = case.rng.choice(("col", "rowptr", "end"))
    if kind == "col" and len(case.col):
        case.col[case.rng.randrange(len(case.col))] = case.rng.choice((*FAR, case.sources))
        case.bad = kind
    elif kind == "rowptr" and case.targets > 1 and len(case.col):
        case.rowptr[case.rng.randrange(1, case.targets)] = case.rng.choice(FAR)
        case.bad = kind
    elif kind == "end" and case.targets:
        case.rowptr[-1] = case.rng.choice((len(case.col) + 1, 2**31 - 1))
        case.bad = kind


def compare(case: Case, what: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    if case.bad is not None:
        with pytest.raises(ERRORS):
            ours()
        return
    output, expected = ours().float(), theirs().float()
    tolerance = 1e-4 if case.dtype is torch.float32 else 4e-2
    torch.testing.assert_close(
        output, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def check_products(case: Case) -> None:
    rowptr, col = case.rowptr, case.col
    x, reduce = case.features(case.sources), case.rng.choice(sparse.REDUCTIONS)
    shape = case.rng.choice((None, (len(col),), (len(col), case.heads)))
    value = (
        None if shape is None or (reduce in ("min", "max") and shape != (len(col),)) else torch.randn(shape)
    )
    if value is not None and reduce in ("min", "max") and case.dtype is torch.bfloat16:
        value = None
    addend = case.features(case.targets) if case.rng.random() < 0.3 else None
    bias = torch.randn(x.shape[1]) if case.rng.random() < 0.3 else None
    compare(
        case,
        f"spmm_reduce {reduce}",
        lambda: sparse.spmm_reduce(rowptr, col, value, x, reduce, addend=addend, addend_scale=0.5, bias=bias),
        lambda: reference.spmm_reduce_reference(rowptr, col, value, x, reduce, addend, 0.5, bias),
    )
    a = case.features(case.targets)
    compare(
        case,
        "sddmm",
        lambda: sparse.sddmm(rowptr, col, a, x, case.heads),
        lambda: reference.sddmm_reference(rowptr, col, a, x, case.heads),
    )


def check_attention(case: Case) -> None:
    rowptr, col, heads = case.rowptr, case.col, case.heads
    x, query = (torch.randn(n, heads * case.width).to(case.dtype) for n in (case.sources, case.targets))
    source, target = torch.randn(case.sources, heads), torch.randn(case.targets, heads)
    weight = torch.randn(heads, case.width)
    calls = (
        (attention.gat, attention.gat_reference, (x, source, target, 0.2)),
        (attention.gatv2, attention.gatv2_reference, (x, query, weight, 0.2)),
        (attention.dot_attention, attention.dot_attention_reference, (query, x, x, heads, 0.3)),
    )
    for op, expected, arguments in calls:
        compare(
            case,
            op.__name__,
            lambda op=op, a=arguments: op(rowptr, col, *a),
            lambda op=expected, a=arguments: op(rowptr, col, *a),
        )


def check_gradients(case: Case) -> None:
    """Of the extremes, the only ones with a kernel of their own; and the transposed graph that they need."""
    if case.bad is not None:
        with pytest.raises(ERRORS):
            sparse.csr_transpose(case.rowptr, case.col, case.sources)
        return
    x = torch.randn(case.sources, case.heads * case.width).round(decimals=1)
    reduce, grads = case.rng.choice(("min", "max")), []
    for run in (sparse.spmm_reduce, reference.spmm_reduce_reference):
        leaf = x.clone().requires_grad_()
        output = run(case.rowptr, case.col, None, leaf, reduce)
        grads.append(
            torch.autograd.grad(output.cos().sum(), leaf)[0] if output.requires_grad else torch.zeros_like(x)
        )
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def check_sort(case: Case) -> None:
    """Coordinates that may be out of range, in either width, from vectors with gaps."""
    rng = case.rng
    edges = rng.choice((0, 1, rng.randrange(2, 200), rng.randrange(2, 200), 20_000))
    row, col = (
        torch.randint(0, max(case.targets, 1), (edges,)),
        torch.randint(0, max(case.sources, 1), (edges,)),
    )
    bad = bool(edges) and not (case.targets and case.sources)
    if edges and rng.random() < 0.3:
        vector, bound = rng.choice(((row, case.targets), (col, case.sources)))
        vector[rng.randrange(edges)] = rng.choice((*FAR, bound))
        bad = True
    if rng.random() < 0.5:
        row, col = row.int(), col.int()
    if rng.random() < 0.3:
        row, col = torch.stack([row, col], dim=1).unbind(1)
    loops = rng.choice((-1, min(case.targets, case.sources)))
    call = (row, col, case.targets, case.sources)
    if bad:
        with pytest.raises(ERRORS):
            sparse.coo_to_csr(*call, loops=loops)
        return
    ours = sparse.coo_to_csr(*call, loops=loops)
    for got, expected in zip(ours, reference.coo_to_csr_reference(*call, loops, True), strict=True):
        assert torch.equal(got, expected)


def check_shapes(case: Case) -> None:
    """Sizes that do not fit each other."""
    x = torch.randn(case.sources, 8)
    edges = len(case.col)
    wrong: list[Callable[[], object]] = [
        lambda: sparse.spmm_reduce(case.rowptr, case.col, torch.ones(edges + 1), x),
        lambda: sparse.spmm_reduce(case.rowptr, case.col, torch.ones(edges, 3), x),
        lambda: sparse.spmm_reduce(case.rowptr, case.col, None, x, addend=torch.ones(case.targets + 1, 8)),
        lambda: sparse.spmm_reduce(case.rowptr, case.col, None, x, bias=torch.ones(7)),
        lambda: sparse.spmm_reduce(case.rowptr, case.col, None, x[0:0].view(-1)),
        lambda: sparse.spmm_reduce(case.rowptr.long(), case.col, None, x),
        lambda: sparse.spmm_reduce(case.rowptr[:0], case.col, None, x),
        lambda: sparse.sddmm(case.rowptr, case.col, torch.ones(case.targets + 1, 8), x),
        lambda: sparse.segment_softmax(case.rowptr, torch.ones(edges)),
        lambda: attention.gat(case.rowptr, case.col, x, torch.ones(case.sources + 1, 2), None, 0.2),
        lambda: attention.gatv2(case.rowptr, case.col, x, torch.ones(case.targets, 9), torch.ones(2, 4), 0.2),
        lambda: sparse.coo_to_csr(case.col, case.col[:-1] if edges else torch.zeros(1), 60, 60),
    ]
    with pytest.raises(ERRORS):
        case.rng.choice(wrong)()


CHECKS = (check_products, check_attention, check_gradients, check_sort, check_shapes)


def fuzz(cases: int, seed: int = 0) -> None:
    for number in range(seed, seed + cases):
        case = make_case(number)
        check = CHECKS[number % len(CHECKS)]
        try:
            check(case)
        except BaseException as error:
            raise AssertionError(f"case {number}, {check.__name__}, bad={case.bad}: {error}") from error


def test_random_cases() -> None:
    fuzz(SUITE_CASES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random graphs through the sparse ops.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz(options.cases, options.seed)
    print(f"{options.cases} cases")
