"""Forwards that wait for each other at each linear."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.calibration.walk import walk


class Model(nn.Module):
    """Two linears on one input, one of them only for positive sums; then one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        output = self.first(input)
        if input.sum() > 0:
            output = output + self.second(input)
        return self.last(torch.tanh(self.last(output)))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def test_each_linear_sees_all_batches_and_what_is_computed_before_it(model: Model) -> None:
    batches = [torch.full((2, 4), value) for value in (1.0, -1.0, 2.0)]
    outputs: list[Tensor] = []
    seen: list[tuple[nn.Module, list[int]]] = []
    doubled = {module: nn.Linear(4, 4) for module in model.children()}

    def visit(module: nn.Module, inputs: dict[int, Tensor]) -> nn.Module | None:
        seen.append((module, sorted(inputs)))
        if module is model.second:
            return None
        if module is model.last:
            before = [doubled[model.first](batch) for batch in batches]
            before = [
                b + model.second(batch) if batch.sum() > 0 else b
                for b, batch in zip(before, batches, strict=True)
            ]
            assert all(torch.equal(inputs[number], value) for number, value in enumerate(before))
        return doubled[module]

    def call(batch: Tensor) -> None:
        outputs.append(model(batch))

    with torch.no_grad():
        walk([partial(call, batch) for batch in batches], list(model.children()), visit)
    assert seen == [(model.first, [0, 1, 2]), (model.second, [0, 2]), (model.last, [0, 1, 2])]
    assert outputs == []  # behind the last linear nothing is computed
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_linear_that_no_batch_reaches_is_not_visited(model: Model) -> None:
    seen: list[nn.Module] = []
    finished: list[Tensor] = []

    def call() -> None:
        finished.append(model(-torch.ones(1, 4)))

    walk([call], list(model.children()), lambda module, inputs: seen.append(module))
    assert seen == [model.first, model.last]
    with torch.no_grad():
        assert torch.equal(finished[0], model(-torch.ones(1, 4)))


@pytest.mark.parametrize("where", ["call", "visit", "interrupted"])
def test_what_is_raised_ends_all_forwards_and_leaves_the_model(model: Model, where: str) -> None:
    threads = threading.active_count()
    error = KeyboardInterrupt if where == "interrupted" else RuntimeError

    def visit(module: nn.Module, inputs: dict[int, Tensor]) -> None:
        if where != "call" and module is model.last:
            raise error("stop")

    def fail() -> None:
        model.first(torch.ones(1, 4))
        raise error("stop")

    calls = [partial(model, torch.ones(1, 4)), fail if where == "call" else partial(model, torch.ones(1, 4))]
    with pytest.raises(error, match="stop"):
        walk(calls, list(model.children()), visit)
    assert not any("forward" in vars(module) for module in model.modules())
    assert threading.active_count() == threads
