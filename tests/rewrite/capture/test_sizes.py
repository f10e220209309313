"""Sizes that a forward reads are tracked into torch's arguments; other uses of them must give equal results."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.rewrite.capture.size import Size
from tests.rewrite.capture.models import Written
from tests.rewrite.capture.test_program_layer import called, in_use, plain, states

TABLE = [1.0 + n / 7 for n in range(400)]


@lru_cache
def remembered(length: int) -> float:
    return 1.0 / length


# What a forward makes of its length, which Python does without asking an `int`.
USES: dict[str, Callable[[Any], float]] = {
    "a float before it": lambda length: 0.5 * length,
    "one over it": lambda length: 1.0 / length,
    "a comparison of a float": lambda length: 2.0 if length > 10.5 else 1.0,
    "a step of many": lambda length: 1.0 + int(0.02 * length),
    "a range": lambda length: float(sum(range(length))),
    "a range of few": lambda length: 1.0 + len(range(0, length, 64)),
    "a place in a list": lambda length: TABLE[length],
    "a part of a list": lambda length: 1.0 + sum(TABLE[: length // 50]),
    "a root": lambda length: math.sqrt(length),
    "a whole root": lambda length: 1.0 + math.isqrt(length),
    "a power": lambda length: 1.01**length,
    "a power of it": lambda length: length**0.5,
    "a key": lambda length: {7: 3.0}.get(length, 1.0),
    "a cache": remembered,
    "many keys": lambda length: sum(remembered(length + n) for n in range(12)),
    "a text": lambda length: float(f"{length}"),
    "bits": lambda length: 1.0 + (length & 8) + (length >> 5) + length.bit_length(),
    "a repeated list": lambda length: float(len([0] * length)),
    "a remainder": lambda length: 1.0 + (100 % length),
    "a rounded one": lambda length: round(length / 3) + 1.0,
}


def test_a_size_before_another_input() -> None:
    """Without tracked sizes, the record of a size comes after all inputs."""

    class Weighted(Written):
        def forward(self, hidden: Tensor, length: int, weight: Tensor) -> Tensor:
            return super().forward(hidden) * remembered(length) * weight

    calls = [(states(1, length), length, torch.rand(1, length, 1)) for length in (7, 7, 9, 7)]
    model, errors = called(Weighted(plain), *calls)
    assert max(errors) <= 1e-5
    assert in_use(model)


@pytest.mark.parametrize("use", USES)
def test_what_python_makes_of_a_size_is_the_same_again_or_the_forward_runs(use: str) -> None:
    class Weighted(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * USES[use](hidden.shape[1])

    lengths = [7, 9, 11, 12, 7, 40, 41, 63, 64, 65, 120, 200, 7, 300]
    model, errors = called(Weighted(plain), *[(states(1, length),) for length in lengths])
    assert max(errors) <= 1e-5
    assert in_use(model)


def test_a_split_into_more_parts_is_not_taken_for_one_into_fewer() -> None:
    class Chunked(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            parts = [super(Chunked, self).forward(part) for part in hidden.split(16, dim=1)]
            return torch.cat(parts, dim=1)

    lengths = [16, 10, 12, 17, 40, 32, 5, 16]
    _, errors = called(Chunked(plain), *[(states(2, length),) for length in lengths])
    assert max(errors) <= 1e-5


def test_numbers_read_of_a_tensor() -> None:
    class Cut(Written):
        def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
            longest = lengths.max().item()
            output = super().forward(hidden)[:, :longest]
            for row, length in enumerate(lengths.tolist()):
                output = output + (row + 1) * output[row : row + 1, :length].sum(1, keepdim=True)
            return functional.pad(output, (0, 0, 0, hidden.shape[1] - longest))

    given = [(states(len(n), 9), torch.tensor(n)) for n in ([3, 5], [9, 2], [4, 4], [5, 6, 7], [1], [3, 5])]
    _, errors = called(Cut(plain), *given, *given)
    assert max(errors) <= 1e-5


def test_sizes_that_happen_to_be_equal() -> None:
    """Batch and heads, length and features, a batch of one: broadcasting is not what was recorded."""

    class Normed(Written):
        def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
            if weight.shape[0] == hidden.shape[0]:
                weight = weight[:, None]
            return super().forward(hidden) * weight

    shapes = [(4, 4), (1, 1), (4, 64), (64, 4), (2, 2), (3, 5), (1, 64), (4, 4)]
    given = [(states(b, n), torch.randn(b if b % 2 else n, 64)) for b, n in shapes]
    _, errors = called(Normed(plain), *given, *given)
    assert max(errors) <= 1e-5


def test_empty_ones() -> None:
    given = [(states(2, 7),), (states(0, 7),), (states(2, 7),), (states(0, 7),), (states(3, 1),)]
    model, errors = called(Written(plain), *given)
    assert not [error for error in errors if error > 1e-5]  # that of nothing is NaN
    assert in_use(model)


class Noted:
    """Counts reads of a size."""

    def __init__(self) -> None:
        self.looks = 0

    def computed(self, function: Any, args: Any, value: int) -> Any:
        return Size(value, self)

    def expect(self, function: Any, args: Any, value: Any) -> None:
        self.looks += 1

    def hashed(self, size: Any) -> None:
        self.looks += 1


@pytest.mark.parametrize(
    ("compute", "result"),
    [
        (lambda n: n + 1, 8),
        (lambda n: 1 - n, -6),
        (lambda n: -n * 2, -14),
        (lambda n: 20 // n + n % 4, 5),
        (lambda n: n / 2, 3.5),
        (lambda n: 2.5 - n, -4.5),
        (lambda n: n**2 + 2**n, 177),
        (lambda n: divmod(n, 2), (3, 1)),
        (lambda n: divmod(30, n), (4, 2)),
        (lambda n: abs(-n) + ~n + (n | 8) + (n ^ 1) + (n << 1) + (1 << n), 7 - 8 + 15 + 6 + 14 + 128),
        (lambda n: max(n, 3) + min(2, n), 9),
        (lambda n: (bool(n), float(n), int(n), str(n), repr(n), f"{n:03d}", round(n), hash(n)), None),
        (lambda n: math.ceil(n) + math.floor(n) + math.trunc(n), 21),
        (lambda n: n == 7.0 and n != "7" and n > 6.5 and not n < 7, True),
        (lambda n: [1, 2] * n, [1, 2] * 7),
        (lambda n: sum((n, n)) + math.prod((2, n)), 28),
    ],
)
def test_it_computes_as_an_int(compute: Callable[[Any], Any], result: Any) -> None:
    size = Size(7, Noted())
    expected = compute(7) if result is None else result
    found = compute(size)
    assert (found.plain if isinstance(found, Size) else found) == expected == compute(7)
