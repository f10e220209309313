"""Layers that call torch's attention themselves get ours, in every form that is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_cpu_accel.rewrite.recorded.attention.scaled_dot_product import torch_attention
from tests.rewrite.recorded.models import Written
from tests.rewrite.recorded.test_recorded_layer import called, in_use, reasons, states

SEEN = torch.rand(9, 7) > 0.3
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "added": {"attn_mask": torch.randn(2, 4, 9, 7)},
    "added to all": {"attn_mask": torch.randn(9, 7)},
    "hidden": {"attn_mask": SEEN},
    "hidden by heads": {"attn_mask": SEEN.expand(4, 9, 7)},
    "all hidden": {"attn_mask": SEEN & (torch.arange(9) != 3)[:, None]},
    "padded": {"attn_mask": torch.tensor([True] * 5 + [False] * 2)[None, None, None]},
    "causal of another length": {"is_causal": True},
}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_torchs(call: str) -> None:
    query, key, value = (torch.randn(2, 4, length, 16) for length in (9, 7, 7))
    ours, theirs = (
        f(query, key, value, **CALLS[call]) for f in (torch_attention, scaled_dot_product_attention)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 16), (4, 9, 16), (2, 3, 4, 9, 16)])
def test_other_dimensions(shape: tuple[int, ...]) -> None:
    query, key, value = (torch.randn(shape) for _ in range(3))
    for options in ({}, {"is_causal": True}):
        ours, theirs = (
            f(query, key, value, **options) for f in (torch_attention, scaled_dot_product_attention)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_grouped_heads_and_causal() -> None:
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    options = {"is_causal": True, "enable_gqa": True}
    ours, theirs = (f(query, key, value, **options) for f in (torch_attention, scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 4, 9, 16, dtype=dtype) for _ in range(3))
    assert torch.equal(torch_attention(query, key, value), scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_a_layer_that_calls_it(dropout: float) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, bias, dropout)

    calls = [(states(batch, 7), *bias) for batch in (2, 3) for bias in ((), (torch.randn(1, 4, 7, 7),))]
    model, errors = called(Written(attend), *calls, *calls)
    assert max(errors) <= 1e-5
    assert bool(in_use(model)) is (dropout == 0)
    used = {step.function for recorded in in_use(model) for step in recorded.program.steps}
    assert (torch_attention in used) is (dropout == 0)
    assert (reasons(model) == set()) is (dropout == 0)
