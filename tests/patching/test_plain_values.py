"""Comparable values, and the detection of their changes inside of a fused module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.patching.inside import Inside
from hf_cpu_accel.patching.plain_values import is_plain_value, is_same_value, value_reader

PLAIN = [
    None,
    True,
    2,
    0.5,
    1j,
    "a",
    b"a",
    range(3),
    slice(1, 2),
    torch.float32,
    torch.device("cpu"),
    nn.Linear,
]
PLAIN += [
    functional.gelu,
    torch.tanh,
    (1, ("a", None)),
    [1, 2],
    {"a": [1]},
    {1, 2},
    frozenset((1,)),
    torch.Size((2, 3)),
]
OTHERS: list[Any] = [
    torch.ones(1),
    nn.Linear(1, 1),
    object(),
    (1, torch.ones(1)),
    {"a": object()},
    [0] * 257,
    functional,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {str(value)[:12]}")
def test_values_and_small_containers_are_plain(value: Any) -> None:
    assert is_plain_value(value)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_what_compares_otherwise_is_not(value: Any) -> None:
    assert not is_plain_value(value)


def test_subclasses_of_containers_are_not() -> None:
    assert not is_plain_value(type("Pair", (tuple,), {})((1, 2)))


def test_what_was_noted_is_a_copy() -> None:
    state = {"sizes": [1, [2]], "other": 1}
    read, values = value_reader(state, ["sizes"])
    assert read(state) == values
    state["sizes"][1].append(3)  # type: ignore[index]
    assert read(state) != values
    del state["sizes"]
    with pytest.raises(KeyError):
        read(state)


def test_a_value_stands_for_an_equal_one_of_its_type() -> None:
    assert is_same_value(1.5, 3 / 2)
    assert not is_same_value(1, 1.0)
    assert not is_same_value(1, True)
    shared = [1]
    assert is_same_value(shared, shared)
    assert not is_same_value([1], [1])


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.activation: Callable[[Tensor], Tensor] = functional.gelu
        self.window = (7, 7)
        self.sizes = [2, 2]
        self.dtype = torch.float32
        self.scale = 0.5
        self.made: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}
        self.limit: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.made = x
        return x


def _append(part: Part) -> None:
    part.sizes.append(3)


CHANGES: dict[str, Callable[[Part], Any]] = {
    "function": lambda part: setattr(part, "activation", torch.tanh),
    "tuple": lambda part: setattr(part, "window", (7, 8)),
    "list": _append,
    "dtype": lambda part: setattr(part, "dtype", torch.bfloat16),
    "number": lambda part: setattr(part, "scale", 0.25),
    "gone": lambda part: delattr(part, "scale"),
    "none before": lambda part: setattr(part, "limit", 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attributes_inside_that_are_other_values_are_noticed(change: Callable[[Part], Any]) -> None:
    root = nn.Sequential(Part())
    inside = Inside(root)
    assert not inside.has_changed()
    change(root[0])  # type: ignore[arg-type]
    assert inside.has_changed()


def test_equal_values_and_what_a_forward_keeps_are_no_change() -> None:
    root = nn.Sequential(Part())
    inside = Inside(root)
    part: Any = root[0]
    part.window, part.sizes, part.made = (7, 3 + 4), [2, 2], torch.ones(1)
    part.by_size[1] = torch.ones(1)
    part.new = 3
    assert not inside.has_changed()


def test_a_copy_looks_at_its_own_modules() -> None:
    root = nn.Sequential(Part())
    root.inside = Inside(root)  # type: ignore[assignment]
    other: Any = copy.deepcopy(root)
    other[0].activation = torch.tanh
    assert other.inside.has_changed()
    assert not root.inside.has_changed()  # type: ignore[operator,union-attr]
