"""Encoder layers on graphs of a few nodes: those that become one op, and those whose parts stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")

PARTS = {"query": (64, 64), "key": (64, 64), "value": (64, 64), "output": (64, 64), "up": (64, 128)}


def layer(function: Callable[..., Tensor]) -> Calls:
    linears = {name: nn.Linear(*sizes) for name, sizes in PARTS.items()}
    norms = {name: nn.LayerNorm(64) for name in ("first", "second")}
    return Calls(function, **linears, down=nn.Linear(128, 64), **norms)


def attention(m: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    heads = (part(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for part in (m.query, m.key, m.value))
    context = F.scaled_dot_product_attention(*heads, mask, **options)
    return m.output(context.transpose(1, 2).reshape(x.shape))


def ffn(m: Any, x: Tensor) -> Tensor:
    return m.down(F.gelu(m.up(x)))


def norms_last(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = m.first(x + attention(m, x, mask))
    return m.second(x + ffn(m, x))


def norms_first(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = x + attention(m, m.first(x), mask)
    return x + ffn(m, m.second(x))


@pytest.mark.parametrize("function", [norms_last, norms_first])
@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 1, 5, 5)])
def test_a_layer_is_one_call(function: Callable[..., Tensor], shape: tuple[int, ...], found: Any) -> None:
    assert found(layer(function), torch.randn(2, 5, 64), torch.randn(shape)) == {"encoder_layer": 1}
    assert only_graph().rewrites["encoder_layer"] == 1
    assert only_graph().rest == {}


def _another_residual(m: Any, x: Tensor) -> Tensor:
    y = m.first(torch.sin(x) + attention(m, x))
    return m.second(y + ffn(m, y))


def _the_middle_is_read_again(m: Any, x: Tensor) -> Tensor:
    y = m.first(x + attention(m, x))
    return m.second(y + ffn(m, y)) * y


def _causal(m: Any, x: Tensor) -> Tensor:
    y = m.first(x + attention(m, x, is_causal=True))
    return m.second(y + ffn(m, y))


def _no_second_residual(m: Any, x: Tensor) -> Tensor:
    return m.second(ffn(m, m.first(x + attention(m, x))))


@pytest.mark.parametrize(
    "function", [_another_residual, _the_middle_is_read_again, _causal, _no_second_residual]
)
def test_what_only_looks_like_a_layer_stays(function: Callable[[Any, Tensor], Tensor], found: Any) -> None:
    calls = found(layer(function), torch.randn(2, 5, 64))
    assert "encoder_layer" not in calls
    assert calls["attention"] == calls["ffn"] == 1
    assert only_graph().rewrites["encoder_layer"] == 0
