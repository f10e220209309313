"""Comparable values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_cpu_accel.guard.plain_values import is_plain_value, is_same_value, value_reader

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
