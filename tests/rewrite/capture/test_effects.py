"""Side effects of a layer happen once per call, and a recording leaves none."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import called, error, in_use, plain, run, states


class Keeping(Written):
    """Keeps its inputs outside of module attributes."""

    def __init__(self, keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(plain)
        self.keep = keep
        self.state = SimpleNamespace(calls=0, inner=SimpleNamespace(seen=[0.0]))
        self.lists: dict[str, list[Any]] = {"calls": [0]}
        self.tensors = [torch.zeros(64)]
        self.numbers = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.keep(self, super().forward(hidden))


def in_an_object(layer: Any, output: Tensor) -> Tensor:
    layer.state.calls += 1
    return output * (2 if layer.state.calls > 5 else 1)


def in_an_object_of_an_object(layer: Any, output: Tensor) -> Tensor:
    layer.state.inner.seen.append(1.0)
    return output * (2 if len(layer.state.inner.seen) > 5 else 1)


def in_a_list(layer: Any, output: Tensor) -> Tensor:
    layer.lists["calls"][0] += 1
    return output * (2 if layer.lists["calls"][0] > 5 else 1)


def in_a_tensor_in_a_list(layer: Any, output: Tensor) -> Tensor:
    layer.tensors[0].add_(1)
    return output * layer.tensors[0]


def as_tensors(layer: Any, output: Tensor) -> Tensor:
    layer.lists["seen"] = [*layer.lists.get("seen", []), output]
    return output + sum(part.mean() for part in layer.lists["seen"])


def drawn(layer: Any, output: Tensor) -> Tensor:
    return output * torch.rand(1, generator=layer.generator)


@pytest.mark.parametrize(
    "keep",
    [in_an_object, in_an_object_of_an_object, in_a_list, in_a_tensor_in_a_list, as_tensors, drawn],
    ids=lambda keep: keep.__name__,
)
def test_what_is_kept_is_kept_once_for_each_call(keep: Any) -> None:
    torch.manual_seed(0)
    model = Stack(Keeping(keep), Keeping(keep)).eval()
    eager = Stack(Keeping(keep), Keeping(keep)).eval()
    eager.load_state_dict(model.state_dict())
    accelerate_for_cpu(model, dtype="float32")
    for number in range(12):
        hidden = states(2, 7 + number % 2)
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert model.layers[0].state == eager.layers[0].state
    assert model.layers[0].lists["calls"] == eager.layers[0].lists["calls"]
    assert not in_use(model)


def test_numbers_of_a_private_generator_are_not_kept() -> None:
    class Private(Keeping):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * self.numbers.random()

    model = Stack(Private(lambda _, output: output), Private(lambda _, output: output)).eval()
    accelerate_for_cpu(model, dtype="float32")
    hidden = states(2, 7)
    outputs = [run(model, hidden) for _ in range(4)]
    assert all(error(one, other) > 1e-3 for one, other in pairwise(outputs))
    assert not in_use(model)


@lru_cache
def halves(length: int, width: int) -> tuple[int, int]:
    return length // 2, width // 2


SHAPES: dict[Any, Any] = {}


@pytest.mark.parametrize("where", ["function", "dictionary", "elsewhere"])
def test_sizes_do_not_outlive_the_call(where: str) -> None:
    """In a cache, say, from where plain code of torch would read them."""

    class Remembering(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            _, length, width = output.shape
            if where == "function":
                length, width = halves(length, width)
            elif where == "dictionary":
                length, width = SHAPES.setdefault(("halves", length, width), (length // 2, width // 2))
            else:
                SHAPES["last"] = length, width = length // 2, width // 2
            return output + output.new_zeros(1, 2 * length, 2 * width).reshape(1, 2 * length, -1)

    lengths = [8, 8, 10, 8, 12, 10]
    model, errors = called(Remembering(plain), *[(states(2, length),) for length in lengths])
    assert max(errors) <= 1e-5
    assert in_use(model)
    assert all(torch.zeros(2, *part).dim() == 3 for part in SHAPES.values())
