"""Linear layers on graphs of a few nodes: every spelling, what is fused into them, and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.activations import ACTIVATIONS
from tests.compiler.conftest import Calls, only_graph, weight

pytestmark = pytest.mark.usefixtures("no_codegen")


LINEARS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: F.linear(x, m.w),
    lambda m, x: F.linear(x, m.w, m.b),
    lambda m, x: x @ m.w.t(),
    lambda m, x: torch.matmul(x, m.w.T),
    lambda m, x: x @ m.w.transpose(0, 1),
    lambda m, x: torch.addmm(m.b, x.view(-1, 32), m.k).view(*x.shape[:2], 48),
    lambda m, x: torch.mm(x.view(-1, 32), m.k),
    lambda m, x: x @ m.k,
]


@pytest.mark.parametrize("function", LINEARS)
def test_spellings_of_a_linear_layer(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(function, w=weight(48, 32), k=weight(32, 48), b=weight(48))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.w * x.sum()),  # not a parameter
        lambda m, x: F.linear(x, m.small),  # few output features
        lambda m, x: F.linear(x.double(), m.wide),
        lambda m, x: m.w @ x.transpose(1, 2),  # the weight in front
    ],
)
def test_products_that_are_no_linear_layers(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(
        function, w=weight(48, 32), small=weight(8, 32), wide=nn.Parameter(torch.randn(48, 32).double())
    )
    assert found(module, torch.randn(3, 5, 32)) == {}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_go_into_the_product(activation: Callable[[Tensor], Tensor], found: Any) -> None:
    module = Calls(lambda m, x: activation(m.up(x)), up=nn.Linear(32, 64))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert set(only_graph().rest) <= {"aten.view.default"}


def test_an_ffn_with_its_residual_is_one_call(found: Any) -> None:
    module = Calls(lambda m, x: x + m.down(F.gelu(m.up(x))), up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    assert found(module, torch.randn(3, 5, 32)) == {"ffn": 1}
    assert only_graph().rest == {}


def test_values_that_others_need_stay(found: Any) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        return F.relu(y) + y.sum()

    assert found(Calls(both, up=nn.Linear(32, 64)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["activation"] == 0


def test_a_residual_that_is_broadcast_stays(found: Any) -> None:
    module = Calls(lambda m, x: m.up(x) + m.b, up=nn.Linear(32, 64), b=weight(64))
    found(module, torch.randn(3, 5, 32))
    assert only_graph().rewrites["residual"] == 0


def test_a_residual_that_is_written_to_stays(found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        product = m.up(x)
        y.add_(1)
        return product + y

    assert found(Calls(function, up=nn.Linear(32, 32)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["residual"] == 0


def test_linears_on_one_input_are_one_product(found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return m.q(x) * m.k(x) + m.v(x)

    q, k, v = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(32, 64)
    assert found(Calls(function, q=q, k=k, v=v), torch.randn(3, 5, 32)) == {"linear_split": 1}


def test_linears_that_do_not_end_with_a_panel_stay_apart(found: Any) -> None:
    module = Calls(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(32, 40), k=nn.Linear(32, 40))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 2}
