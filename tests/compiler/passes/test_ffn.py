"""Feed-forward networks on graphs of a few nodes: two linear layers that become one op, and those that stay two."""

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


def ffn(function: Callable[[Any, Tensor], Tensor]) -> Calls:
    return Calls(function, up=nn.Linear(32, 64), down=nn.Linear(64, 32))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_linears_with_an_activation_between_them_are_one_call(
    activation: Callable[[Tensor], Tensor], found: Any
) -> None:
    module = ffn(lambda m, x: m.down(activation(m.up(x))))
    assert found(module, torch.randn(3, 5, 32)) == {"ffn": 1}
    assert only_graph().rewrites["ffn"] == 1
    assert only_graph().rest == {}


def test_the_residual_goes_into_the_call(found: Any) -> None:
    assert found(ffn(lambda m, x: x + m.down(F.gelu(m.up(x)))), torch.randn(3, 5, 32)) == {"ffn": 1}
    assert only_graph().rest == {}


def _intermediate_that_others_read(m: Any, x: Tensor) -> Tensor:
    y = F.gelu(m.up(x))
    return m.down(y) + y.sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.down(m.up(x)),  # no activation
        lambda m, x: F.gelu(m.down(F.gelu(m.up(x)))),  # one after the second, too
        lambda m, x: m.down(F.gelu(m.up(x)) + 1.0),
        _intermediate_that_others_read,
    ],
)
def test_two_linears_that_are_no_ffn_stay(function: Callable[[Any, Tensor], Tensor], found: Any) -> None:
    assert found(ffn(function), torch.randn(3, 5, 32)) == {"linear": 2}
    assert only_graph().rewrites["ffn"] == 0
