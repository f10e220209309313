"""Weights that are cast or untied after a layer was recorded."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import error, in_use, plain, run, states


class Gated(Written):
    """Takes its states to the dtype of a module in it, as T5's feed-forward networks do."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.gate = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        gated: Tensor = self.gate(output.to(self.gate.weight.dtype))
        return gated


def test_one_module_that_is_cast() -> None:
    torch.manual_seed(0)
    model = Stack(Gated(), Gated()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(2):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert len(in_use(model)) == 2
    for stack in (model, eager):
        stack.layers[1].gate.to(torch.bfloat16)
    for _ in range(2):
        assert run(model, hidden).dtype is torch.bfloat16
        assert error(run(model, hidden), run(eager, hidden).float()) <= 0.02


def test_one_parameter_by_two_names() -> None:
    class Tied(Written):
        def __init__(self) -> None:
            super().__init__(plain)
            self.gain = nn.Parameter(torch.rand(64))
            self.other = self.gain

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * self.gain

    torch.manual_seed(0)
    model = Stack(Tied(), Tied()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for name in ("other", "gain"):
        for _ in range(2):
            assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
        for stack in (model, eager):
            setattr(stack.layers[0], name, nn.Parameter(torch.ones(64)))
    assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
