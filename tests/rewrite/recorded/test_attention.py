"""Attention in all the ways in which layers write it out: one op, and what it gave."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.recorded.models import Stack, Written
from tests.rewrite.recorded.test_recorded_layer import error, in_use, run, states

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scaled_before(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = torch.matmul(query * 0.25, key.mT)
    return torch.matmul(functional.softmax(scores if bias is None else bias + scores, dim=-1), value)


def scaled_after(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.transpose(2, 3)
    scores = (scores if bias is None else scores + bias) / math.sqrt(16)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return functional.dropout(weights, 0.1, False) @ value


def filled(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.mT * 0.25
    if bias is not None:
        scores = scores.masked_fill(bias > 1, -1e9)
    return nn.Softmax(dim=-1)(scores) @ value


def batched(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    batch, heads, length, size = query.shape
    query, key, value = (part.reshape(batch * heads, -1, size) for part in (query, key, value))
    scores = torch.bmm(query * 0.25, key.transpose(1, 2))
    if scores.size() != (batch * heads, length, length):
        raise ValueError(f"scores of shape {scores.shape}")
    if bias is not None:
        scores = scores.view(batch, 4, length, length) + bias
        scores = scores.view(batch * heads, length, length)
    return torch.bmm(functional.softmax(scores, dim=-1), value).view(batch, heads, length, size)


def of_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """In five dimensions, as windows of images have them."""
    query, key, value = (part.unsqueeze(1) for part in (query, key, value))
    return ((query @ key.mT * 0.25).softmax(-1) @ value).squeeze(1)


WAYS = [scaled_before, scaled_after, filled, batched, of_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", WAYS, ids=lambda way: way.__name__)
def test_one_op_of_ours(attend: Attend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_cpu_accel.rewrite.recorded import attention

    calls: list[tuple[int, ...]] = []
    own = attention.attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return own(query, *args, **kwargs)

    monkeypatch.setattr(attention, "attention", counted)
    torch.manual_seed(0)
    model = Stack(Written(attend), Written(attend)).eval().to(dtype)
    biases = [None, torch.randn(1, 1, 9, 9), torch.randn(3, 4, 9, 9)]
    given = [
        (states(3, 9).to(dtype), bias if bias is None or attend is filled else bias.to(dtype))
        for bias in biases
    ]
    given = [args for args in given if args[1] is None] if attend is of_rows else given
    expected = [run(model, *args).float() for args in given]
    accelerate_for_cpu(model, dtype="auto" if dtype is torch.bfloat16 else "float32")
    for args, theirs in zip(given, expected, strict=True):
        run(model, *args)
        calls.clear()
        assert error(run(model, *args), theirs) <= (1e-5 if dtype is torch.float32 else 0.03)
        assert len(calls) == 2
    assert len(in_use(model)) == 2 * len({bias is None or bias.shape for _, bias in given}) - 2 * (
        len(given) == 3
    )


def test_weights_that_are_returned_are_computed() -> None:
    class Told(Written):
        def forward(self, hidden: Tensor) -> Any:
            output = super().forward(hidden)
            weights = (self.query(hidden) @ self.key(hidden).mT).softmax(-1)
            return output + weights @ hidden, weights

    class First(Stack):
        def forward(self, hidden: Tensor, *args: Any) -> Tensor:
            for layer in self.layers:
                hidden, _ = layer(hidden)
            return hidden

    torch.manual_seed(0)
    model = First(Told(scaled_before), Told(scaled_before)).eval()
    hidden = states(2, 7)
    expected = run(model, hidden)
    accelerate_for_cpu(model, dtype="float32")
    assert max(error(run(model, hidden), expected) for _ in range(3)) <= 1e-5
    assert not in_use(model)  # softmax is torch's
