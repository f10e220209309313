"""Sums and their norms on graphs of a few nodes: those that become one op, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_sum_and_its_norm_are_one_call(norm: type[nn.Module], found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        total = m.first(x) + m.second(x)
        return total * m.third(total)

    norms = {name: norm(32, eps=1e-6) for name in ("first", "second", "third")}
    name = "layer_norm" if norm is nn.LayerNorm else "rms_norm"
    assert found(Calls(function, **norms), torch.randn(3, 5, 32)) == {name: 2, f"add_{name}": 1}
    assert only_graph().rest == {"<built-in function getitem>": 2, "aten.mul.Tensor": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: m.norm(m.first(x) + m.first(y)),  # nobody else needs the sum
        lambda m, x, y: (
            (x * 2 + y * 3).add(1).mul(m.norm(x * 2 + y * 3))
        ),  # Inductor adds while it multiplies
        lambda m, x, y: (s := m.first(x) + m.first(y)[:1]) * m.norm(s),  # broadcast
    ],
)
def test_sums_that_are_not_norms_alone_stay(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(function, first=nn.LayerNorm(32), norm=nn.LayerNorm(32))
    assert "add_layer_norm" not in found(module, torch.randn(3, 5, 32), torch.randn(3, 5, 32))
