"""linear, linear_split and ffn on so many rows that each thread takes blocks of them: as on the same rows in several calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.ffn import ffn
from hf_cpu_accel.ops.linear import linear, linear_split
from hf_cpu_accel.packing.linear import FORMS, pack_linear

ROWS, INPUTS, HIDDEN, OUTPUTS = 50_021, 48, 40, 72
PIECE = 1_000  # too few to be shared out in blocks


@pytest.fixture(params=(1, 2), autouse=True)
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_pieces(run, *rows: Tensor) -> Tensor:
    return torch.cat([run(*part) for part in zip(*(x.split(PIECE) for x in rows), strict=True)])


@pytest.mark.parametrize("dtype", FORMS)
def test_many_rows(dtype: str) -> None:
    """Rows with gaps between them, and a residual of another dtype."""
    x = torch.randn(ROWS, 2 * INPUTS)[:, :INPUTS]
    residual = torch.randn(ROWS, OUTPUTS).bfloat16()
    up, down = (pack_linear(torch.randn(n, k), dtype) for n, k in ((HIDDEN, INPUTS), (OUTPUTS, HIDDEN)))
    wide, bias = pack_linear(torch.randn(OUTPUTS, INPUTS), dtype), torch.randn(OUTPUTS)

    def one(x: Tensor, residual: Tensor) -> Tensor:
        return linear(x, wide, bias, activation="silu", residual=residual)

    def split(x: Tensor) -> Tensor:
        return torch.cat(linear_split(x, wide, bias, (32, OUTPUTS - 32)), dim=1)

    def two(x: Tensor, residual: Tensor) -> Tensor:
        return ffn(x, up, None, down, bias, activation="relu", residual=residual)

    for run, rows in ((one, (x, residual)), (split, (x,)), (two, (x, residual))):
        torch.testing.assert_close(run(*rows), in_pieces(run, *rows), rtol=1e-5, atol=1e-5)


def test_against_float64() -> None:
    x, weight = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS)
    result = linear(x, pack_linear(weight, "float32"))
    torch.testing.assert_close(result.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
