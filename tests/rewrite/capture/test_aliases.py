"""Layers that write to tensors that share memory with others, or are copies of them, depending on strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_cpu_accel import accelerate_for_cpu, restore
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import error, in_use, plain, reasons, run, states


class Aliasing(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        turned = output.transpose(0, 1)
        made = turned.contiguous()  # a copy, unless there is one row or one column
        made.add_(1)
        return turned.transpose(0, 1) + made.transpose(0, 1)


class Joined(Written):
    """The strides of its sum are those of `hidden`, and in steps that join it with a product others."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        made = output.contiguous()
        made.add_(1)
        return output + made


class Renamed(Written):
    """Only one of the names is read behind the write."""

    def forward(self, hidden: Tensor) -> Tensor:
        made = super().forward(hidden).transpose(0, 1).contiguous().to(hidden.dtype)
        made[:, 1:] += 1
        return made.transpose(0, 1)


class Spread(Written):
    """`broadcast_tensors` gives the very tensors where they have one size."""

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        output = super().forward(hidden)
        one, both = torch.broadcast_tensors(output, other)
        return one + both + output.sum(0, keepdim=True)


def turned(batch: int, length: int) -> Tensor:
    """Of the strides of a batch that comes second."""
    return torch.randn(length, batch, 64).transpose(0, 1)


@pytest.mark.parametrize("kind", [Aliasing, Joined])
@pytest.mark.parametrize("make", [states, turned])
def test_both_names_of_what_may_be_a_copy(kind: type[Written], make: Callable[[int, int], Tensor]) -> None:
    torch.manual_seed(0)
    model = Stack(kind(plain)).eval()
    given = [make(*size) for size in ((1, 5), (1, 5), (2, 1), (3, 5), (2, 7))]
    expected = [run(model, hidden) for hidden in given]
    accelerate_for_cpu(model, dtype="float32")
    for hidden, theirs in zip(given, expected, strict=True):
        assert error(run(model, hidden), theirs) <= 1e-5
    assert not in_use(model)
    assert {str(said) for said in reasons(model)} == {"it writes in place to tensors that may share memory"}


@pytest.mark.parametrize("make", [states, turned])
def test_a_tensor_that_may_be_a_copy_of_one_that_is_not_read_again(
    make: Callable[[int, int], Tensor],
) -> None:
    torch.manual_seed(0)
    model = Stack(Renamed(plain), Renamed(plain)).eval()
    given = [make(*size) for size in ((1, 7), (2, 7), (2, 1), (1, 9), (3, 7), (1, 1), (1, 7))]
    expected = [run(model, hidden) for hidden in given]
    for order in (1, -1):  # the first, which is recorded, is one tensor, or two
        accelerate_for_cpu(model, dtype="float32")
        for hidden, theirs in zip(given[::order], expected[::order], strict=True):
            assert error(run(model, hidden), theirs) <= 1e-5
        assert in_use(model)
        restore(model)


def test_tensors_that_are_given_back_in_a_list() -> None:
    torch.manual_seed(0)
    model = Stack(Spread(plain)).eval()
    given = [
        (states(*size), torch.randn(batch, 1, 64)) for size, batch in (((1, 7), 1), ((2, 7), 2), ((1, 7), 2))
    ]
    expected = [run(model, *both) for both in given]
    accelerate_for_cpu(model, dtype="float32")
    for both, theirs in zip(given, expected, strict=True):
        assert error(run(model, *both), theirs) <= 1e-5
    assert in_use(model)


def test_a_copy_of_what_is_given_that_may_be_none() -> None:
    class Halving(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden.ravel().mul_(0.5)  # where the first call is turned it writes to a copy
            return super().forward(hidden)

    torch.manual_seed(0)
    model = Stack(Halving(plain)).eval()
    given = [turned(2, 7), turned(2, 7), states(2, 9), states(2, 7)]
    expected = [run(model, hidden.clone()) for hidden in given]
    accelerate_for_cpu(model, dtype="float32")
    for hidden, theirs in zip(given, expected, strict=True):
        ours = hidden.clone()
        assert error(run(model, ours), theirs) <= 1e-5
        assert torch.equal(ours, hidden if not hidden.is_contiguous() else hidden * 0.5)
    assert not in_use(model)
