"""Arithmetic that changes nothing does not stand between ops that belong together; what does change something stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize("function", [lambda y: y / 1.0, lambda y: y * 1, lambda y: (y + 0) / 1])
def test_neutral_operations_go(function: Callable[[Tensor], Tensor], found: Any) -> None:
    module = Calls(lambda m, x: x + function(m.linear(x)), linear=nn.Linear(32, 32))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rest == {}


def _integers(m: Any, x: Tensor) -> Tensor:
    """A division makes floats of them."""
    return x.int() / 1


def _a_copy_that_outlives_its_source(m: Any, x: Tensor) -> Tensor:
    y = torch.sin(x)
    kept = y * 1.0
    y.add_(1.0)
    return kept + y


def _a_copy_that_is_written_to(m: Any, x: Tensor) -> Tensor:
    y = torch.sin(x)
    kept = y / 1.0
    kept.add_(1.0)
    return kept + y


@pytest.mark.parametrize(
    "function", [_integers, _a_copy_that_outlives_its_source, _a_copy_that_is_written_to]
)
def test_operations_that_only_look_neutral_stay(
    function: Callable[[Any, Tensor], Tensor], found: Any
) -> None:
    found(Calls(function), torch.randn(3, 5, 32))
    assert sum(n for name, n in only_graph().rest.items() if "mul" in name or "div" in name) == 1
