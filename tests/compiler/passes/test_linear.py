"""Linear layers on graphs of a few nodes: every spelling, what is fused into them, and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.conftest import Calls, weight

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
