"""Second derivatives of the ops on graphs against references in float64; forward mode and torch.func, which they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_cpu_accel.ops.graph_attention import dot_attention, gat, gatv2
from hf_cpu_accel.ops.messages.messages import edge_messages, message_reduce
from hf_cpu_accel.ops.messages.reference import edge_messages_reference, message_reduce_reference
from hf_cpu_accel.ops.segment_matmul import segment_matmul
from hf_cpu_accel.ops.sparse import coo_to_csr, sddmm, segment_softmax, spmm_reduce
from hf_cpu_accel.ops.sparse_reference import spmm_reduce_reference

NODES, EDGES, HEADS, WIDTH = 9, 40, 2, 6
ENDS = [2, 2, 6, NODES]


@pytest.fixture
def graph() -> tuple[Tensor, Tensor, Tensor]:
    """rowptr, col, and a permutation of the edges; the last row is empty."""
    row, col = torch.randint(0, NODES - 1, (EDGES,)), torch.randint(0, NODES, (EDGES,))
    return (*coo_to_csr(row, col, NODES, NODES)[:2], torch.randperm(EDGES).int())


def segment_products(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.split([2, 0, 4, NODES - 6])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


Function = Callable[..., Tensor]
# The op and its reference, which take the graph's rowptr, col and order and the leaves, and the shapes of these.
CASES: dict[str, tuple[Function, Function, Sequence[tuple[int, ...]]]] = {}
for _reduce in ("sum", "mean", "min", "max"):
    for _name, _shapes in {
        "": [(NODES, WIDTH)],
        " weighted": [(NODES, WIDTH), (EDGES,)],
        " by head": [(NODES, WIDTH), (EDGES, HEADS)],
    }.items():
        CASES[f"spmm {_reduce}{_name}"] = (
            lambda p, c, o, x, v=None, r=_reduce: spmm_reduce(p, c, v, x, r),
            lambda p, c, o, x, v=None, r=_reduce: spmm_reduce_reference(p, c, v, x, r),
            _shapes,
        )
    CASES[f"segments {_reduce}"] = (
        lambda p, c, o, x, r=_reduce: spmm_reduce(p, None, None, x, r),
        lambda p, c, o, x, r=_reduce: spmm_reduce_reference(p, None, None, x, r),
        [(EDGES, WIDTH)],
    )
for _reduces in ("sum", "mean,std", "min,var,max"):
    for _relu in (False, True):
        CASES[f"messages {_reduces}{' relu' if _relu else ''}"] = (
            lambda p, c, o, x, t, e, r=_reduces, k=_relu: message_reduce(
                p, c, x, r.split(","), target=t, edge=e, order=o, relu=k
            ),
            lambda p, c, o, x, t, e, r=_reduces, k=_relu: message_reduce_reference(
                p, c, o, x, t, e, k, r, False
            )[0],
            [(NODES, WIDTH), (NODES, WIDTH), (EDGES, WIDTH)],
        )
CASES |= {
    "edge messages": (
        lambda p, c, o, x, t, e: edge_messages(p, c, x, target=t, edge=e, order=o, relu=True),
        lambda p, c, o, x, t, e: edge_messages_reference(p, c, o, x, t, e, True),
        [(NODES, WIDTH), (NODES, WIDTH), (EDGES, WIDTH)],
    ),
    "sddmm": (
        lambda p, c, o, a, b: sddmm(p, c, a, b, HEADS),
        lambda p, c, o, a, b: (
            (a.index_select(0, rows(p)) * b.index_select(0, c)).view(EDGES, HEADS, -1).sum(-1)
        ),
        [(NODES, WIDTH), (NODES, WIDTH)],
    ),
    "softmax": (
        lambda p, c, o, scores: segment_softmax(p, scores),
        lambda p, c, o, scores: softmax(p, scores),
        [(EDGES, HEADS)],
    ),
    "segment_matmul": (
        lambda p, c, o, x, w: segment_matmul(x, ENDS, w),
        lambda p, c, o, x, w: segment_products(x, w),
        [(NODES, WIDTH), (len(ENDS), WIDTH, 3)],
    ),
    "gat": (
        lambda p, c, o, x, s, t: gat(p, c, x, s, t, 0.2),
        lambda p, c, o, x, s, t: weighted(
            p, c, torch.nn.functional.leaky_relu(s[c.long()] + t[rows(p)], 0.2), x
        ),
        [(NODES, WIDTH), (NODES, HEADS), (NODES, HEADS)],
    ),
    "gatv2": (
        lambda p, c, o, x, t, w: gatv2(p, c, x, t, w, 0.2),
        lambda p, c, o, x, t, w: weighted(
            p,
            c,
            (torch.nn.functional.leaky_relu(x[c.long()] + t[rows(p)], 0.2).view(EDGES, HEADS, -1) * w).sum(
                -1
            ),
            x,
        ),
        [(NODES, WIDTH), (NODES, WIDTH), (HEADS, WIDTH // HEADS)],
    ),
    "dot_attention": (
        lambda p, c, o, q, k, v: dot_attention(p, c, q, k, v, HEADS, 0.5),
        lambda p, c, o, q, k, v: weighted(
            p, c, (q[rows(p)] * k[c.long()]).view(EDGES, HEADS, -1).sum(-1) * 0.5, v
        ),
        [(NODES, WIDTH)] * 3,
    ),
}


def rows(rowptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(NODES), rowptr.diff().long())


def softmax(rowptr: Tensor, scores: Tensor) -> Tensor:
    powers = scores.exp()
    return powers / powers.new_zeros(NODES, scores.shape[1]).index_add(0, rows(rowptr), powers)[rows(rowptr)]


def weighted(rowptr: Tensor, col: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    messages = softmax(rowptr, scores).unsqueeze(2) * x[col.long()].view(EDGES, HEADS, -1)
    return x.new_zeros(x.shape).index_add(0, rows(rowptr), messages.flatten(1))


def derivatives(function: Function, graph: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[list[Any]]:
    """The gradients of an energy for each leaf, and for each leaf those of the squared gradient for it."""
    energy = function(*graph, *leaves).sin().sum()
    first = torch.autograd.grad(energy, leaves, create_graph=True)
    penalties = [grad.square().sum() for grad in first]
    return [
        list(first),
        *[
            list(torch.autograd.grad(part, leaves, retain_graph=True, allow_unused=True))
            for part in penalties
        ],
    ]


def compare(ours: list[list[Any]], truth: list[list[Any]]) -> None:
    for grads, expected in zip(ours, truth, strict=True):
        for grad, wanted in zip(grads, expected, strict=True):
            if wanted is None or not wanted.any():
                assert grad is None or grad.abs().max() < 1e-5
                continue
            torch.testing.assert_close(
                grad.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.detach().abs().max().item()
            )


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str, graph: tuple[Tensor, Tensor, Tensor]) -> None:
    op, reference, shapes = CASES[name]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
    compare(derivatives(op, graph, leaves), derivatives(reference, graph, doubled))


@pytest.mark.parametrize("name", ["messages mean,std", "sddmm", "dot_attention"])
def test_one_tensor_given_twice(name: str, graph: tuple[Tensor, Tensor, Tensor]) -> None:
    op, reference, shapes = CASES[name]
    leaf = torch.randn(NODES, WIDTH, requires_grad=True)
    others = [torch.randn(shape) for shape in shapes[2:]]

    def twice(function: Function, dtype: torch.dtype) -> Function:
        return lambda p, c, o, x: function(p, c, o, x, x, *(other.to(dtype) for other in others))

    ours = derivatives(twice(op, torch.float32), graph, [leaf])
    truth = derivatives(twice(reference, torch.float64), graph, [leaf.detach().double().requires_grad_()])
    compare(ours, truth)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_and_transforms_are_refused(name: str, graph: tuple[Tensor, Tensor, Tensor]) -> None:
    op, _, shapes = CASES[name]
    for position in range(len(shapes)):
        leaves = [torch.randn(shape) for shape in shapes]
        with forward_ad.dual_level():
            dual = [*leaves]
            dual[position] = forward_ad.make_dual(leaves[position], torch.randn(shapes[position]))
            with pytest.raises(RuntimeError, match="restore"):
                op(*graph, *dual)

        def energy(leaf: Tensor, leaves: list[Tensor] = leaves, position: int = position) -> Tensor:
            return op(*graph, *leaves[:position], leaf, *leaves[position + 1 :]).sum()

        for transform in (torch.func.grad(energy), torch.func.jacrev(energy), torch.func.hessian(energy)):
            with pytest.raises(RuntimeError, match="restore"):
                transform(leaves[position])
