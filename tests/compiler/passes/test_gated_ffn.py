"""The pass that finds gated FFNs: of two linear layers, or of the halves of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.activations import ACTIVATIONS
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate_first", [True, False])
def test_a_gated_ffn_of_two_linears_is_one_call(
    activation: Callable[[Tensor], Tensor], gate_first: bool, found: Any
) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        gate, value = activation(m.gate(x)), m.up(x)
        return x + m.down(gate * value if gate_first else value * gate)

    gate, up, down = nn.Linear(32, 64, bias=False), nn.Linear(32, 64), nn.Linear(64, 32)
    module = Calls(function, gate=gate, up=up, down=down)
    assert found(module, torch.randn(3, 5, 32)) == {"gated_ffn": 1}
    assert only_graph().rest == {}


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize(
    "halves",
    [
        lambda x: x.chunk(2, dim=-1),
        lambda x: x.split(64, dim=2),
        lambda x: torch.split(x, [64, 64], dim=-1),
    ],
)
def test_a_gated_ffn_of_one_linear_is_one_call(
    halves: Callable[[Tensor], Sequence[Tensor]], gate: int, found: Any
) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        parts = halves(m.up(x))
        return m.down(parts[1 - gate] * F.gelu(parts[gate]))

    module = Calls(function, up=nn.Linear(32, 128), down=nn.Linear(64, 32))
    assert found(module, torch.randn(3, 5, 32)) == {"gated_ffn": 1}
    assert only_graph().rest == {}


def _gate_that_others_see(m: Any, x: Tensor) -> Tensor:
    gate, value = m.up(x).chunk(2, dim=-1)
    return m.down(F.silu(gate) * value) + gate.sum()


def _halves_of_the_rows(m: Any, x: Tensor) -> Tensor:
    gate, value = m.up(x).chunk(2, dim=0)
    return m.wide(F.silu(gate) * value)


def _unequal_parts(m: Any, x: Tensor) -> Tensor:
    gate, value, _ = m.up(x).split([64, 64, 0], dim=-1)
    return m.down(F.silu(gate) * value)


@pytest.mark.parametrize("function", [_gate_that_others_see, _halves_of_the_rows, _unequal_parts])
def test_products_that_only_look_gated_stay(function: Callable[[Any, Tensor], Tensor], found: Any) -> None:
    layers = {"up": nn.Linear(32, 128), "down": nn.Linear(64, 32), "wide": nn.Linear(128, 32)}
    assert found(Calls(function, **layers), torch.randn(4, 5, 32)) == {"linear": 2}
    assert only_graph().rewrites["gated_ffn"] == 0
