"""Products with matrices of the layer itself run on this package's op, except routers and those of few features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import restore
from hf_cpu_accel.rewrite.linear.shared import multiply
from tests.rewrite.capture.models import Written
from tests.rewrite.capture.test_program_layer import called, error, in_use, plain, reasons, run, states


class Mixed(Written):
    """Adds what `features` of a product with a matrix of its own weigh."""

    def __init__(self, features: int = 64, *, chooses: bool = False) -> None:
        super().__init__(plain)
        self.mixing = nn.Parameter(0.1 * torch.randn(features, 64))
        self.offset = nn.Parameter(torch.randn(features))
        self.chooses = chooses

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = functional.linear(hidden.float(), self.mixing.float(), self.offset)
        if self.chooses:
            mixed = mixed.topk(2).values.sigmoid()
        return super().forward(hidden) + mixed.mean(dim=-1, keepdim=True)


def products(model: nn.Module) -> int:
    return sum(step.function is multiply for found in in_use(model) for step in found.program.steps)


def test_a_product_with_a_matrix_of_the_layer_is_ours() -> None:
    model, errors = called(Mixed(), *((states(*shape),) for shape in ((2, 7), (1, 1), (3, 9), (2, 7))))
    assert max(errors) <= 1e-5
    assert products(model) == 2  # one in each layer
    assert not reasons(model)


def test_a_written_matrix_counts_at_once() -> None:
    model, _ = called(Mixed(), (states(2, 7),))
    hidden = states(2, 7)
    before = run(model, hidden)
    for layer in model.modules():
        if isinstance(layer, Mixed):
            layer.mixing.data.mul_(3.0)
    given = run(model, hidden)
    assert error(given, before) > 1e-2
    restore(model)
    assert error(given, run(model, hidden)) <= 1e-5


def test_a_matrix_that_our_op_does_not_take_counts_as_torchs() -> None:
    layer = Mixed()
    layer.mixing = nn.Parameter(torch.randn(64, 64).T)
    model, errors = called(layer, (states(2, 7),), (states(2, 7),))
    assert max(errors) <= 1e-5
    assert reasons(model) == {"PyTorch computes part of it (linear)"}


@pytest.mark.parametrize("layer", [Mixed(8), Mixed(32, chooses=True)], ids=["few features", "experts"])
def test_others_stay(layer: nn.Module) -> None:
    model, errors = called(layer, (states(2, 7),), (states(2, 7),))
    assert max(errors) <= 1e-5
    assert not products(model)
    assert not reasons(model)
