"""Results of weights and numbers alone are computed once, and again after a weight changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BeitConfig, BeitModel, Data2VecVisionConfig, Data2VecVisionModel

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.capture.constants import Constants
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import called, error, in_use, plain, reasons, run, states

LENGTH = 7


def _index(length: int) -> Tensor:
    """[length, length]: the distance of each two tokens, in a table; written to, as BEiT's is."""
    places = torch.arange(length)
    index = (places[:, None] - places[None]).contiguous()
    index += length - 1
    return index


class Windowed(Written):
    """With a bias for each distance, of one length."""

    def __init__(self, entries: int = 2 * LENGTH - 1) -> None:
        super().__init__(plain)
        self.table = nn.Parameter(torch.randn(entries, 4))

    def bias(self) -> Tensor:
        return self.table.mul(2.0)[_index(LENGTH).view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden, self.bias()[None])


def folds(model: nn.Module) -> int:
    """How many programs compute something once."""
    return sum(
        any(isinstance(step.function, Constants) for step in recorded.program.steps)
        for recorded in in_use(model)
    )


def test_a_table_of_distances_is_read_once() -> None:
    model, errors = called(Windowed(), *((states(batch, LENGTH),) for batch in (2, 2, 3, 1)))
    assert max(errors) <= 1e-5
    assert folds(model) == 2
    assert not any(
        step.function is torch.arange for recorded in in_use(model) for step in recorded.program.steps
    )


def _write(table: nn.Parameter) -> None:
    with torch.no_grad():
        table.mul_(-3)


def _write_unseen(table: nn.Parameter) -> None:
    table.data[2] = 9.0


def _write_by_numpy(table: nn.Parameter) -> None:
    table.detach().numpy()[:] *= 4


def _exchange_memory(table: nn.Parameter) -> None:
    table.data = torch.ones_like(table) - table


@pytest.mark.parametrize("edit", [_write, _write_unseen, _write_by_numpy, _exchange_memory])
def test_a_table_that_is_written_to(edit: Callable[[nn.Parameter], None]) -> None:
    model, hidden = Stack(Windowed(), Windowed()).eval(), states(2, LENGTH)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(2):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    for stack in (model, eager):
        edit(stack.layers[1].table)
    for _ in range(2):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert folds(model) == 2


def test_a_table_that_is_exchanged() -> None:
    model, hidden = Stack(Windowed(), Windowed()).eval(), states(2, LENGTH)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    run(model, hidden)
    other = torch.randn(2 * LENGTH - 1, 4)
    for stack in (model, eager):
        stack.layers[0].table = nn.Parameter(other.clone())
    assert error(run(model, hidden), run(eager, hidden)) <= 1e-5


def test_a_branch_on_the_values_of_a_weight() -> None:
    class Branching(Windowed):
        def bias(self) -> Tensor:
            bias = super().bias()
            return bias if self.table.sum() > 0 else -2 * bias

    layer = Branching()
    with torch.no_grad():
        layer.table.abs_()
    model, hidden = Stack(layer, copy.deepcopy(layer)).eval(), states(2, LENGTH)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for sign in (1, -1, -1):
        for stack in (model, eager):
            stack.layers[0].table.data.mul_(sign)
        for _ in range(2):
            assert error(run(model, hidden), run(eager, hidden)) <= 1e-5


class Overwriting(Windowed):
    """Writes its input to a result of weights: to the tensor, to a view of it, or to its base."""

    def __init__(self, place: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.place = place

    def forward(self, hidden: Tensor) -> Tensor:
        target, read = self.place(self.table.exp())
        target.add_(hidden.mean())
        return Written.forward(self, hidden) * read.sum()


@pytest.mark.parametrize(
    "place",
    [lambda made: (made, made), lambda made: (made[0], made), lambda made: (made, made.view(-1)[1:])],
    ids=["itself", "a view", "its base"],
)
def test_what_is_written_to_is_made_anew(place: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    _, errors = called(Overwriting(place), *((states(2, LENGTH),) for _ in range(4)))
    assert max(errors) <= 1e-5


def test_what_is_handed_out_is_the_callers_own() -> None:
    class Telling(Windowed):
        def forward(self, hidden: Tensor) -> Any:
            bias = self.bias()
            return Written.forward(self, hidden, bias[None]), bias

    class Writing(Stack):
        def forward(self, hidden: Tensor, *args: Any) -> Tensor:
            for layer in self.layers:
                hidden, bias = layer(hidden)
                bias.zero_()
            return hidden

    model, hidden = Writing(Telling(), Telling()).eval(), states(2, LENGTH)
    expected = run(model, hidden)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(4):
        assert error(run(model, hidden), expected) <= 1e-5
    assert in_use(model)


def test_what_would_take_much_memory_is_not_kept() -> None:
    large = Windowed(1 << 15)  # more values than are compared in each call
    model, errors = called(large, *((states(2, LENGTH),) for _ in range(3)))
    assert max(errors) <= 1e-5
    assert in_use(model)
    assert not folds(model)


class Remembering(Windowed):
    """Its index is remembered by length, for all layers."""

    @staticmethod
    @lru_cache(maxsize=4)
    def index(length: int) -> Tensor:
        return _index(length)

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        bias = self.table[self.index(length).view(-1) % len(self.table)].view(length, length, -1)
        return Written.forward(self, hidden, bias.permute(2, 0, 1)[None])


def test_an_index_that_a_cache_of_functions_holds() -> None:
    calls = [(states(batch, length),) for length in (7, 9) for batch in (2, 2, 3, 1)]
    model, errors = called(Remembering(), *calls)
    assert max(errors) <= 1e-5
    assert not reasons(model)
    assert folds(model) == len(in_use(model)) == 2
    assert all({sizes[0] for sizes in recorded.compared} >= {2, 3} for recorded in in_use(model))
    assert torch.equal(Remembering.index(7), _index(7))


@pytest.mark.parametrize(
    ("kind", "config"), [(BeitModel, BeitConfig), (Data2VecVisionModel, Data2VecVisionConfig)]
)
def test_image_encoders_with_biases_of_relative_positions(kind: Any, config: Any) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    options = {"image_size": 32, "patch_size": 8, "use_relative_position_bias": True}
    model = kind(config(**sizes, **options)).eval()
    for name, parameter in model.named_parameters():
        if "relative_position_bias" in name:
            nn.init.normal_(parameter)
    images = [torch.randn(batch, 3, 32, 32) for batch in (1, 1, 2, 3, 1)]
    expected = [run(model, image) for image in images]
    accelerate_for_cpu(model, dtype="float32")
    assert (
        max(error(run(model, image), theirs) for image, theirs in zip(images, expected, strict=True)) <= 1e-5
    )
    assert not reasons(model)
    assert folds(model) == 3
