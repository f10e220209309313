"""What an op may do with a call: give what its reference gives, or, if the call is not a good one, refuse it in words."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.fuzz.call import Call, copied

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)


def judge_good(call: Call) -> None:
    """
    Raises:
        AssertionError: the result is not that of the reference, or an argument was written to.
    """
    before, twin = copied(call.arguments), Call(call.op, copied(call.arguments), call.reference)
    got = call.run()
    _check_unchanged(call, before)
    expected = twin.expected()
    if not call.opaque:
        _check_alike(call, got, expected)


def judge_spoiled(call: Call) -> None:
    """
    Raises:
        AssertionError: an answer to what the reference refuses, another one than the reference's, or a refusal without words.
    """
    before, twin = copied(call.arguments), Call(call.op, copied(call.arguments), call.reference)
    try:
        got = call.run()
    except REFUSALS as error:
        if not str(error).strip():
            raise AssertionError(f"refused without a word: {error!r}") from error
        return
    _check_unchanged(call, before)
    if call.opaque:
        return
    try:
        expected = twin.expected()
    except Exception as error:
        raise AssertionError(f"answers what the reference refuses ({error})") from error
    # Whether the answer is another one: what a bound allows for is that of the call before it was changed.
    _check_alike(replace(call, bound=2 * call.bound + 2e-2), got, expected)


def _check_unchanged(call: Call, before: list[object]) -> None:
    for place, (argument, was) in enumerate(zip(call.arguments, before, strict=True)):
        if place not in call.written:
            assert _same(argument, was), f"argument {place} was written to"


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, list) and isinstance(other, list):
        return all(map(_same, one, other))
    return True


def _bytes(x: Tensor) -> Tensor:
    """NaN is not equal to itself, its bytes are."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1).view(torch.uint8)


def _check_alike(call: Call, got: list[Tensor], expected: list[Tensor]) -> None:
    kinds = [[(tuple(x.shape), x.dtype) for x in side] for side in (got, expected)]
    assert kinds[0] == kinds[1], f"{kinds[0]} and not {kinds[1]}"
    if call.alike is not None:
        return call.alike(got, expected)
    for one, other in zip(got, expected, strict=True):
        if one.numel():
            _check_close(call, one.double(), other.double())


def _check_close(call: Call, got: Tensor, expected: Tensor) -> None:
    """Where the reference is finite the op is, too, and close to it; what else comes of NaN and infinity is not the same in every
    order of sums."""
    finite = expected.isfinite()
    assert call.hides or not got[~finite].isfinite().any(), "a finite number where the reference has none"
    got, expected = got[finite], expected[finite]
    if not expected.numel():
        return
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} values are not finite"
    error = (got - expected).abs().max() / expected.abs().max().clamp_min(call.least)
    assert error <= call.bound, f"{float(error):.2e} off, the bound is {call.bound:.2e}"
