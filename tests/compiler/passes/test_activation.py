"""Activations after linear layers on graphs of a few nodes: those that go into the product, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.activations import ACTIVATIONS
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize("activation", [*ACTIVATIONS, F.hardswish, nn.ReLU6()])
def test_activations_go_into_the_product(activation: Callable[[Tensor], Tensor], found: Any) -> None:
    module = Calls(lambda m, x: activation(m.up(x)), up=nn.Linear(32, 64))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["activation"] == 1
    assert set(only_graph().rest) <= {"aten.view.default"}


@pytest.mark.parametrize(
    "activation",
    [
        lambda y: F.hardtanh(y, -1.0, 6.0),  # the bounds of ReLU6 are 0 and 6
        lambda y: y * torch.sigmoid(1.5 * y),  # another factor than that of quick GELU
        lambda y: 0.5 * y * (1.0 + torch.tanh(0.5 * (y + 0.044715 * torch.pow(y, 3.0)))),
        F.elu,
    ],
)
def test_functions_that_only_look_like_an_activation_stay(
    activation: Callable[[Tensor], Tensor], found: Any
) -> None:
    module = Calls(lambda m, x: activation(m.up(x)), up=nn.Linear(32, 64))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["activation"] == 0


def test_values_that_others_need_stay(found: Any) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        return F.relu(y) + y.sum()

    assert found(Calls(both, up=nn.Linear(32, 64)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["activation"] == 0
