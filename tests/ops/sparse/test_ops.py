"""CSR ops against plain torch: odd sizes, empty rows, shared rows, layouts, threads, gradients; and graph attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops import graph_attention as attention
from hf_cpu_accel.ops import sparse
from hf_cpu_accel.ops import sparse_reference as reference
from tests.ops.sparse.cases import (
    DTYPES,
    OPS,
    WIDTHS,
    check_attention,
    check_gradients,
    check_spmm,
    csr,
    random_graph,
)


def check_sparse(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for width, dtype, reduce in itertools.product((1, 17, 40, 145), DTYPES, sparse.REDUCTIONS):
        check_spmm(width, dtype, reduce, None, seed)
        check_spmm(width, dtype, reduce, 1, seed)
    for heads, width in ((2, 16), (3, 5), (4, 32)):
        for dtype in DTYPES:
            check_spmm(heads * width, dtype, "sum", heads, seed)
            check_attention(width, heads, dtype, seed)
    check_gradients(seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", sparse.REDUCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width: int, reduce: str, dtype: torch.dtype) -> None:
    check_spmm(width, dtype, reduce, None, seed=width)
    check_spmm(width, dtype, reduce, 1, seed=width)


@pytest.mark.parametrize(
    ("heads", "width"), [(1, 16), (2, 16), (4, 32), (8, 16), (3, 5), (2, 40), (6, 1), (16, 3), (20, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads(heads: int, width: int, dtype: torch.dtype) -> None:
    for reduce in sparse.REDUCTIONS:
        check_spmm(heads * width, dtype, reduce, heads, seed=heads)
    check_attention(width, heads, dtype, seed=heads)


@settings(max_examples=60, deadline=None)
@given(
    targets=st.integers(1, 60),
    sources=st.integers(1, 60),
    edges=st.integers(0, 400),
    loops=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_sorting(targets: int, sources: int, edges: int, loops: bool, wide: bool, seed: int) -> None:
    target, source = random_graph(targets, sources, edges, seed)
    if not wide:
        target, source = target.int(), source.int()
    added = min(targets, sources) if loops else -1
    ours = sparse.coo_to_csr(target, source, targets, sources, loops=added)
    theirs = reference.coo_to_csr_reference(target, source, targets, sources, added, True)
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected)
    turned = sparse.csr_transpose(ours[0], ours[1], sources)
    for got, expected in zip(turned, reference.csr_transpose_reference(*ours[:2], sources), strict=True):
        assert torch.equal(got, expected)


def test_large_sorts_use_all_threads_and_give_the_same() -> None:
    target, source = random_graph(500, 500, 60_000)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(sparse.coo_to_csr(target, source, 500, 500, loops=500))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    expected = reference.coo_to_csr_reference(target, source, 500, 500, 500, True)
    assert all(torch.equal(one, two) for one, two in zip(results[0], expected, strict=True))


@pytest.mark.parametrize("reduce", sparse.REDUCTIONS)
def test_a_row_that_threads_share(reduce: str) -> None:
    """A star: 40,000 edges point to one node. The result is the same for any number of threads."""
    target = torch.zeros(40_000, dtype=torch.long)
    target[::50] = torch.randint(0, 300, (800,))
    rowptr, col, _ = sparse.coo_to_csr(target, torch.randint(0, 900, (40_000,)), 300, 900)
    x, addend = torch.randn(900, 40), torch.randn(300, 40)
    threads, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(sparse.spmm_reduce(rowptr, col, None, x, reduce, addend=addend))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)
    expected = reference.spmm_reduce_reference(rowptr, col, None, x.double(), reduce, addend.double())
    torch.testing.assert_close(outputs[0].double(), expected, rtol=1e-5, atol=1e-3)


def test_segments_and_edges_of_no_row() -> None:
    """col=None reduces x itself; entries beyond rowptr[-1] do not count, and get no gradient."""
    rowptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x = torch.randn(7, 9, requires_grad=True)
    for reduce in sparse.REDUCTIONS:
        output = sparse.spmm_reduce(rowptr, None, None, x, reduce)
        expected = reference.spmm_reduce_reference(rowptr, None, None, x, reduce)
        torch.testing.assert_close(output, expected)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)]
        torch.testing.assert_close(*grads)
        assert not grads[0][5:].any()
    col = torch.tensor([1, 2, 0, 3, 3, 900, -5], dtype=torch.int32)
    assert sparse.spmm_reduce(rowptr, col, None, x).isfinite().all()


def test_gradients() -> None:
    check_gradients()


def test_gradients_of_the_reference_in_double() -> None:
    rowptr, col = csr(5, 6, 14)
    x, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (14, 2)))
    for reduce in sparse.REDUCTIONS:

        def run(x: Tensor, value: Tensor, reduce: str = reduce) -> Tensor:
            return sparse.spmm_reduce(rowptr, col, value, x, reduce)

        assert torch.autograd.gradcheck(run, (x, value))


@pytest.mark.parametrize("heads", [1, 3, 4, 16, 20])
def test_gradients_of_edge_products_and_softmax(heads: int) -> None:
    rowptr, col = csr(11, 13, 60)
    width = 4 * heads
    a, b, scores = (
        torch.randn(shape, requires_grad=True) for shape in ((11, width), (13, width), (60, heads))
    )
    pairs = (
        (
            lambda: sparse.sddmm(rowptr, col, a, b, heads),
            lambda: reference.sddmm_reference(rowptr, col, a, b, heads),
        ),
        (
            lambda: sparse.segment_softmax(rowptr, scores),
            lambda: reference.segment_softmax_reference(rowptr, scores),
        ),
    )
    for ours, theirs in pairs:
        weights = torch.randn(60, heads)
        results = [run() for run in (ours, theirs)]
        torch.testing.assert_close(*results)
        leaves = (a, b, scores)
        grads = [torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True) for y in results]
        for mine, other in zip(*grads, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 4, 5])
def test_scores_that_are_not_finite_stay_in_their_row_and_head(heads: int) -> None:
    rowptr, _ = csr(41, 53, 300)
    scores = torch.randn(300, heads)
    scores[7, 0], scores[50, heads - 1], scores[100, 0], scores[110] = torch.nan, torch.inf, -torch.inf, -1e30
    ours, theirs = sparse.segment_softmax(rowptr, scores), reference.segment_softmax_reference(rowptr, scores)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert 0 < int(ours.isnan().sum()) < ours.numel() / 2


def test_layouts_change_nothing() -> None:
    rowptr, col = csr(41, 53, 300)
    x = torch.randn(53, 24)
    expected = sparse.spmm_reduce(rowptr, col, None, x)
    for layout in (torch.zeros(53, 48)[:, ::2], torch.zeros(53, 64)[:, :24], torch.zeros(24, 53).t()):
        assert torch.equal(sparse.spmm_reduce(rowptr, col, None, layout.copy_(x)), expected)
    target, source = random_graph(41, 53, 300)
    pairs = torch.stack([target, source], dim=1)
    assert not pairs[:, 0].is_contiguous()
    assert torch.equal(sparse.coo_to_csr(pairs[:, 0], pairs[:, 1], 41, 53)[1], col)


@pytest.mark.parametrize("reduce", sparse.REDUCTIONS)
def test_nan_is_not_hidden(reduce: str) -> None:
    rowptr, col = csr(41, 53, 300)
    x = torch.randn(53, 20)
    x[int(col[1]), 7] = torch.nan
    output = sparse.spmm_reduce(rowptr, col, None, x, reduce)
    assert torch.equal(output.isnan(), reference.spmm_reduce_reference(rowptr, col, None, x, reduce).isnan())


def test_nothing_to_do() -> None:
    empty, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert sparse.spmm_reduce(empty, none, None, torch.zeros(0, 5)).shape == (0, 5)
    assert sparse.spmm_reduce(empty.repeat(4), none, None, torch.zeros(2, 0), "max").shape == (3, 0)
    assert torch.equal(
        sparse.spmm_reduce(empty.repeat(4), none, None, torch.ones(2, 6), "max"), torch.zeros(3, 6)
    )
    assert sparse.coo_to_csr(none, none, 0, 0)[0].tolist() == [0]


@pytest.mark.parametrize("bad", [-1, 53, 2**31 - 1, -(2**31)])
def test_indices_that_are_not_there_are_refused(bad: int) -> None:
    rowptr, col = csr(41, 53, 300)
    col[250] = bad
    x = torch.randn(53, 16)
    for reduce in sparse.REDUCTIONS:
        with pytest.raises(RuntimeError, match="rows that exist"):
            sparse.spmm_reduce(rowptr, col, None, x, reduce)
    with pytest.raises(RuntimeError, match="rows that exist"):
        attention.gat(rowptr, col, x, torch.randn(53, 2), None, 0.2)
    with pytest.raises(RuntimeError, match="out of range"):
        sparse.coo_to_csr(col, col, 53, 53)
    rowptr[7] = bad
    with pytest.raises(RuntimeError, match="must not decrease"):
        sparse.spmm_reduce(rowptr, col.clamp(0, 52), None, x)


def test_bad_shapes_are_named() -> None:
    rowptr, col = csr(41, 53, 300)
    x = torch.randn(53, 16)
    for arguments, message in (
        ((rowptr, col, None, x, "product"), "reduce='product'"),
        ((rowptr, col, torch.ones(299), x), r"value of shape \(299,\)"),
        ((rowptr, col, torch.ones(300, 3), x), "divide 16"),
        ((rowptr, col, None, x[0]), r"x of shape \(16,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse.spmm_reduce(*arguments)


def test_opcheck() -> None:
    rowptr, col, order = sparse.coo_to_csr(*random_graph(21, 21, 90), 21, 21)
    x, value = torch.randn(21, 24, requires_grad=True), torch.randn(90, 2, requires_grad=True)
    turned = sparse.csr_transpose(rowptr, col, 21)
    torch.library.opcheck(OPS.coo_to_csr, (order.long() % 21, col.long(), 21, 21, 21, True))
    torch.library.opcheck(OPS.csr_transpose, (rowptr, col, 21))
    bias = torch.randn(24, requires_grad=True)
    torch.library.opcheck(OPS.spmm_reduce, (rowptr, col, value, x, "mean", x, 0.5, bias, *turned))
    torch.library.opcheck(OPS.spmm_extreme, (rowptr, col, None, x, "max", *turned))
    torch.library.opcheck(OPS.sddmm, (rowptr, col, x, x, 2))
    torch.library.opcheck(OPS.segment_softmax, (rowptr, value))
    scores, plain = torch.randn(21, 2), x.detach()
    torch.library.opcheck(OPS.gat, (rowptr, col, plain, scores, scores, 0.2))
    torch.library.opcheck(OPS.gatv2, (rowptr, col, plain, plain, torch.randn(2, 12), 0.2))
    torch.library.opcheck(OPS.dot_attention, (rowptr, col, plain, plain, plain, 2, 0.3))
