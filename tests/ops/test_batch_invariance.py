"""A row's result does not depend on the rows that it is computed with, on its place among them, or on the threads: bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.experts import experts_ffn
from hf_cpu_accel.ops.ffn import ffn, gated_ffn
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import FORMS, PackedWeight, pack_linear
from tests.ops.test_experts import choice_of, experts_of

ROWS = 40
LONG = 33_001  # k is cut into parts
SHAPES = ((1, 1), (77, 35), (640, 129), (LONG, 37))
AS_IT_IS = "float32, not packed"
KINDS = (*FORMS, AS_IT_IS)
TILES_FROM = 17  # rows: fewer bfloat16 rows are another kernel's where there are AMX tiles (tile_gemm.h)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def packed(weight: Tensor, kind: str) -> PackedWeight:
    if kind == AS_IT_IS:
        return PackedWeight(weight, None, weight.shape[1], weight.shape[0], "float32")
    return pack_linear(weight, kind)


def check_rows(run: Callable[..., Tensor], *rows: Tensor, few: int = 1, seed: int = 0) -> None:
    """`run` on batches of rows, by 1 and by 2 threads, against `run` on each row alone (`few`: on so many copies of it)."""
    choose = random.Random(seed)
    count = len(rows[0])
    with threads(1):
        alone = torch.cat([run(*(x[i : i + 1].repeat(few, 1) for x in rows))[:1] for i in range(count)])
    for number in (1, 2):
        with threads(number):
            for size in (few, few + 1, *choose.sample(range(few, count), 5), count):
                first = choose.randint(0, count - size)
                part = slice(first, first + size)
                assert torch.equal(run(*(x[part] for x in rows)), alone[part]), (size, first, number)


def few_rows(kind: str) -> int:
    """Rows from which on the results of a kind stay the same."""
    return TILES_FROM if kind == "bfloat16" and (extension.status().tier or "").startswith("amx") else 1


def most_rows(kind: str) -> int:
    """Rows up to which the results of a kind stay the same."""
    return 16 if kind == AS_IT_IS else ROWS  # more are multiplied by packed panels (float_rows.h)


def check_kind(kind: str, k: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(ROWS, k, generator=g) - 0.1) * torch.logspace(-2, 2, ROWS)[:, None]  # sums above 2^24
    weight, bias = (torch.rand(n, k, generator=g) - 0.2) / k, torch.randn(n, generator=g)
    residual, weight = torch.randn(ROWS, n, generator=g), packed(weight, kind)
    x, residual = x[: most_rows(kind)], residual[: most_rows(kind)]

    def run(x: Tensor, residual: Tensor) -> Tensor:
        return linear(x, weight, bias, activation="gelu", residual=residual)

    check_rows(run, x.to(dtype), residual.to(dtype), few=few_rows(kind), seed=seed)
    check_rows(lambda x: linear(x, weight), x.to(dtype), few=few_rows(kind), seed=seed + 1)


def check_ffn(kind: str, gated: bool, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    up = packed(torch.randn(192 if gated else 96, 200, generator=g) / 14, kind)
    down = packed(torch.randn(67, 96, generator=g) / 10, kind)
    up_bias, residual = torch.randn(up.out_features, generator=g), torch.randn(ROWS, 67, generator=g)

    def run(x: Tensor, residual: Tensor) -> Tensor:
        layer = gated_ffn if gated else ffn
        return layer(x, up, up_bias, down, None, activation="silu", residual=residual)

    x = torch.randn(ROWS, 200, generator=g)
    check_rows(run, x[: most_rows(kind)], residual[: most_rows(kind)], few=few_rows(kind), seed=seed)


def check_experts(kind: str, seed: int = 0) -> None:
    """Tokens meet others at each of their experts."""
    torch.manual_seed(seed)
    experts = experts_of(4, 64, 96, kind, biases=True)
    index, weights = choice_of(ROWS, 4, 2)

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return experts_ffn(x, index, weights, experts)

    if few_rows(kind) == 1:
        check_rows(run, torch.randn(ROWS, 96), index, weights, seed=seed)


def check_batch_invariance(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for kind in KINDS:
        for k, n in SHAPES:
            check_kind(kind, k, n, seed=seed)
        for gated in (False, True):
            check_ffn(kind, gated, seed)
        if kind != AS_IT_IS:
            check_experts(kind, seed)


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(kind: str, k: int, n: int, dtype: torch.dtype) -> None:
    check_kind(kind, k, n, dtype)


def test_few_rows_of_bfloat16() -> None:
    """So many as drafted tokens are, which AMX tiles do not multiply."""
    weight = packed(torch.randn(129, 640), "bfloat16")
    check_rows(lambda x: linear(x, weight), torch.randn(TILES_FROM - 1, 640))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ffn(kind: str, gated: bool) -> None:
    check_ffn(kind, gated)


@pytest.mark.parametrize("kind", FORMS)
def test_experts(kind: str) -> None:
    check_experts(kind)
