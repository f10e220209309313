"""Linear layers on one input on graphs of a few nodes: those that become one product, and those that stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.linear import MAX_SPLIT
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True), (False, False, False)])
def test_linears_on_one_input_are_one_product(biases: tuple[bool, ...], found: Any) -> None:
    linears = {name: nn.Linear(32, 64, bias=bias) for name, bias in zip(("q", "k", "v"), biases, strict=True)}
    module = Calls(lambda m, x: m.q(x) * m.k(x) + m.v(x), **linears)
    assert found(module, torch.randn(3, 5, 32)) == {"linear_split": 1}
    assert only_graph().rewrites["parallel_linears"] == 1


def test_the_outputs_may_have_several_widths(found: Any) -> None:
    module = Calls(lambda m, x: m.q(x)[..., :32] * m.k(x), q=nn.Linear(32, 96), k=nn.Linear(32, 32))
    assert found(module, torch.randn(3, 5, 32)) == {"linear_split": 1}


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda m, x: m.q(x) * m.k(x), 40),  # not a multiple of a panel
        (lambda m, x: m.q(x) * m.k(torch.sin(x)), 64),
        (lambda m, x: m.q(x) * m.k(x.transpose(0, 1)).transpose(0, 1), 64),
    ],
)
def test_linears_that_cannot_be_joined_stay_apart(
    function: Callable[[Any, Tensor], Tensor], width: int, found: Any
) -> None:
    module = Calls(function, q=nn.Linear(32, width), k=nn.Linear(32, width))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 2}
    assert only_graph().rewrites["parallel_linears"] == 0


def test_more_linears_than_a_call_has_outputs_stay_apart(found: Any) -> None:
    linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(MAX_SPLIT + 1))
    module = Calls(lambda m, x: sum(torch.sin(linear(x)) for linear in m.linears), linears=linears)
    assert found(module, torch.randn(3, 5, 32)) == {"linear": MAX_SPLIT + 1}
