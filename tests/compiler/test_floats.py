"""Floats that a model reads: its own are constants of the graph, those of a call are not. Either way there is one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from tests.compiler.conftest import only_graph


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.gain = 0.3

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.up(x * scale) * self.gain + scale * 2


@pytest.mark.parametrize("fullgraph", [False, True])
def test_arguments_stay_arguments(fullgraph: bool) -> None:
    model, x = Scaled().eval(), torch.randn(3, 5, 16)
    fast: Any = torch.compile(model, backend=hf_cpu_accel, dynamic=True, fullgraph=fullgraph)
    for scale in (0.5, 0.7, 3.0):
        with torch.no_grad():
            torch.testing.assert_close(fast(x, scale), model(x, scale))
    assert only_graph().ours == {"hf_cpu_accel.linear.default": 1}
    assert not torch_private.counters("graph_break")


@pytest.mark.usefixtures("no_codegen")
def test_those_of_a_model_are_constants_until_they_change() -> None:
    model, x = Scaled().eval(), torch.randn(3, 5, 16)
    fast: Any = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
    with torch.no_grad():
        fast(x, 0.5)
        assert only_graph().rest["aten.item.default"] == 1  # the argument's
        model.gain = 0.6
        torch.testing.assert_close(fast(x, 0.5), model(x, 0.5))
