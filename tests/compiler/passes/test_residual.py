"""Additions after products on graphs of a few nodes: those that go into the product, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph, weight

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize(
    "function", [lambda m, x: x + m.up(x), lambda m, x: m.up(x) + x, lambda m, x: torch.sin(x) + m.up(x)]
)
def test_an_addition_goes_into_the_linear_before_it(
    function: Callable[[Any, Tensor], Tensor], found: Any
) -> None:
    assert found(Calls(function, up=nn.Linear(32, 32)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["residual"] == 1
    assert "aten.add.Tensor" not in only_graph().rest


def test_an_addition_goes_into_the_gated_ffn_before_it(found: Any) -> None:
    gate, up, down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
    module = Calls(lambda m, x: x + m.down(F.silu(m.gate(x)) * m.up(x)), gate=gate, up=up, down=down)
    assert found(module, torch.randn(3, 5, 32)) == {"gated_ffn": 1}
    assert only_graph().rewrites["residual"] == 1
    assert only_graph().rest == {}


def _is_written_to(m: Any, x: Tensor) -> Tensor:
    y = x * 1.5
    product = m.up(x)
    y.add_(1)
    return product + y


def _product_that_others_read(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    return (y + x) * y


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.up(x) + m.b,  # broadcast
        lambda m, x: torch.add(m.up(x), x, alpha=2),
        _is_written_to,
        _product_that_others_read,
    ],
)
def test_additions_that_a_product_cannot_make_stay(
    function: Callable[[Any, Tensor], Tensor], found: Any
) -> None:
    assert found(Calls(function, up=nn.Linear(32, 32), b=weight(32)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["residual"] == 0
