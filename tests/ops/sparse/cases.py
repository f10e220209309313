"""Random graphs, and checks of the sparse ops on them against their references."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hf_cpu_accel.ops import graph_attention as attention
from hf_cpu_accel.ops import sparse
from hf_cpu_accel.ops import sparse_reference as reference

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1, 3, 8, 16, 17, 40, 64, 72, 128, 145, 272)
OPS = torch.ops.hf_cpu_accel


def random_graph(targets: int, sources: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Edges (target, source); some targets have none, some pairs come twice."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, max(targets, 1), (edges,), generator=generator)
    target[: edges // 4] = target[0] if edges else 0  # one row with many
    return target, torch.randint(0, max(sources, 1), (edges,), generator=generator)


def csr(targets: int, sources: int, edges: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rowptr, col, _ = sparse.coo_to_csr(*random_graph(targets, sources, edges, seed), targets, sources)
    return rowptr, col


def assert_near(output: Tensor, expected: Tensor, what: str) -> None:
    tolerance = 1e-5 if output.dtype is torch.float32 else 1e-2
    message = lambda text: f"{what}: {text}"  # noqa: E731
    torch.testing.assert_close(
        output.float(), expected.float(), rtol=tolerance, atol=10 * tolerance, msg=message
    )


def check_spmm(
    width: int, dtype: torch.dtype, reduce: str, heads: int | None, seed: int, edges: int = 300
) -> None:
    rowptr, col = csr(41, 53, edges, seed)
    torch.manual_seed(seed)
    x = torch.randn(53, width).to(dtype)
    value = None if heads is None else torch.randn(edges) if heads == 1 else torch.randn(edges, heads)
    addend, bias = torch.randn(41, width).to(dtype), torch.randn(width)
    for own, offset in ((None, None), (addend, bias)):
        options = {"addend": own, "addend_scale": 0.5, "bias": offset}
        output = sparse.spmm_reduce(rowptr, col, value, x, reduce, **options)
        expected = reference.spmm_reduce_reference(rowptr, col, value, x, reduce, own, 0.5, offset)
        assert output.is_contiguous()
        assert output.dtype == dtype
        assert_near(output, expected, f"{reduce} {width} {dtype} heads={heads} seed={seed}")


def check_attention(width: int, heads: int, dtype: torch.dtype, seed: int) -> None:
    rowptr, col = csr(41, 53, 300, seed)
    torch.manual_seed(seed)
    x, key, target = (torch.randn(n, width * heads).to(dtype) for n in (53, 53, 41))
    source_score, target_score = torch.randn(53, heads), torch.randn(41, heads)
    weight = torch.randn(heads, width)
    what = f"width={width} heads={heads} {dtype} seed={seed}"
    for other in (target_score, None):
        arguments = rowptr, col, x, source_score, other, 0.2
        assert_near(attention.gat(*arguments), attention.gat_reference(*arguments), f"gat {what}")
    mlp = rowptr, col, x, target, weight, 0.2
    assert_near(attention.gatv2(*mlp), attention.gatv2_reference(*mlp), f"gatv2 {what}")
    dot = rowptr, col, target, key, x, heads, 0.3
    assert_near(attention.dot_attention(*dot), attention.dot_attention_reference(*dot), f"dot {what}")


def check_gradients(seed: int = 0) -> None:
    """Of x and the values, with the kernels and with the reference."""
    rowptr, col = csr(41, 53, 300, seed)
    for reduce, heads in itertools.product(sparse.REDUCTIONS, (None, 1, 2)):
        torch.manual_seed(seed)
        x = torch.randn(53, 10).round(decimals=1)  # ties
        shape = (300,) if heads == 1 else (300, 2)
        value = None if heads is None else torch.randn(shape).round(decimals=1)
        grad, grads = torch.randn(41, 10), []
        for run in (sparse.spmm_reduce, reference.spmm_reduce_reference):
            leaves = [leaf.clone().requires_grad_() for leaf in (x, value) if leaf is not None]
            run(rowptr, col, leaves[1] if heads else None, leaves[0], reduce).backward(grad)
            grads.append([leaf.grad for leaf in leaves])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda m, r=reduce, h=heads: f"{r} {h}: {m}"
            )
