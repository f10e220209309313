"""Attention in all forms that layers write out: one op with equal results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import error, in_use, run, states

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


def summed(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """By letters, in another order of dimensions."""
    scores = torch.einsum("bhik,jbhk->bhij", query, key.permute(2, 0, 1, 3)) / 4
    weights = torch.softmax(scores if bias is None else scores - -bias, -1)
    return torch.einsum("bhij,bhjd->bihd", [weights, value]).transpose(1, 2)


def summed_in_blocks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    query, key, value = (part.transpose(1, 2).unsqueeze(1) for part in (query, key, value))
    scores = torch.einsum("...qhd,...khd->...hqk", query, key) * 0.25
    if bias is not None:
        scores += bias.unsqueeze(1)
    weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.einsum("...hqk,...khd->...qhd", weights, value).squeeze(1).transpose(1, 2)


def written_to(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.mT
    scores *= 0.25
    if bias is not None:
        scores.add_(bias).sub_(bias)
    return scores.softmax(-1) @ value


def of_windows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Swin's: the batch is one of images and windows."""
    batch, heads, length, _ = query.shape
    scores = query @ key.mT * 0.25
    if bias is not None:
        mask = bias[:, 0]
        scores = scores.view(batch // mask.shape[0], mask.shape[0], heads, length, length)
        scores = scores + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, heads, length, length)
    return scores.softmax(-1) @ value


def of_heads(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Swin v2's: a factor for each head."""
    factor = torch.arange(1.0, 5.0).view(4, 1, 1).to(query.dtype) / 8
    scores = query @ key.mT * factor
    return (scores if bias is None else scores + bias).softmax(-1) @ value


def told_by_sizes(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """DeBERTa's: sizes of scores and of views of them."""
    heads, length = query.size(1), query.size(-2)
    query, key, value = (part.contiguous().view(-1, length, part.size(-1)) for part in (query, key, value))
    scores = torch.bmm(query, key.transpose(-1, -2) / 4)
    scores = scores.view(-1, 4, scores.size(-2), scores.size(-1)) + 0
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1)
    output = torch.bmm(weights.view(-1, weights.size(-2), weights.size(-1)), value)
    return output.view(-1, heads, output.size(-2), output.size(-1))


def with_sinks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """A score of each query for no key, which takes a part of its weights."""
    scores = query @ key.mT * 0.25
    scores = torch.cat([scores if bias is None else scores + bias, query[..., :1]], dim=-1)
    return functional.softmax(scores.float(), dim=-1)[..., :-1].to(query.dtype) @ value


def below_maxima(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """GPT-OSS's: with sinks, and less by the maximum."""
    scores = query @ key.mT * 0.25
    scores = torch.cat([scores if bias is None else scores + bias, query[..., :1]], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return functional.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1] @ value


def filled_in_place(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """XLM's: the mask is made as large as the scores."""
    scores = query @ key.mT * 0.25
    if bias is not None:
        mask = (bias > 1).expand_as(scores)
        scores.masked_fill_(mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def capped(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """T5Gemma's."""
    scores = torch.tanh(query @ key.mT * 0.25 / 1.5) * 1.5
    return (scores if bias is None else scores + bias).softmax(-1) @ value


def chosen(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """GPT's older masks."""
    scores = query @ key.mT * 0.25
    lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    if bias is not None:
        scores = torch.where(bias <= 1, scores, lowest)
    return scores.softmax(-1).type(value.dtype) @ value


WAYS = [
    *(scaled_before, scaled_after, filled, batched, of_rows, summed, summed_in_blocks, written_to),
    *(of_windows, of_heads, told_by_sizes, with_sinks, below_maxima, filled_in_place, capped),
    chosen,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend", WAYS, ids=lambda way: way.__name__)
def test_one_op_of_ours(attend: Attend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_cpu_accel.rewrite.capture.attention import attention_step as attention

    calls: list[tuple[int, ...]] = []
    own = attention.attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return own(query, *args, **kwargs)

    monkeypatch.setattr(attention, "attention", counted)
    torch.manual_seed(0)
    model = Stack(Written(attend), Written(attend)).eval().to(dtype)
    biases = [None, torch.randn(1, 1, 9, 9), torch.randn(3, 4, 9, 9)]
    if attend not in (filled, filled_in_place, chosen):
        biases = [None, *(bias.to(dtype) for bias in biases[1:])]
    given = [(states(3, 9).to(dtype), bias) for bias in biases]
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


def test_weights_that_are_returned_are_computed_if_they_are_read() -> None:
    class Told(Written):
        def forward(self, hidden: Tensor, bias: Tensor) -> Any:
            output = super().forward(hidden)
            weights = (self.query(hidden) @ self.key(hidden).mT / 8 + bias).softmax(-1)
            return output + weights @ hidden, weights

    class First(Stack):
        def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            self.told = [self.layers[0](hidden, bias), self.layers[1](hidden, bias)]
            return self.told[1][0]

    torch.manual_seed(0)
    model = First(Told(scaled_before), Told(scaled_before)).eval()
    hidden, bias = states(2, 7), torch.randn(2, 7, 7)
    expected, theirs = run(model, hidden, bias), model.told[0][1]
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(3):
        assert error(run(model, hidden, bias), expected) <= 1e-5
        assert error(model.told[0][1], theirs) <= 1e-5
    assert len(in_use(model)) == 2
    bias.zero_()
    with pytest.raises(RuntimeError, match="written to before its output was read"):
        model.told[1][1].sum()


def of_nobody(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Rows that may attend nothing are 0."""
    hidden = (bias > 1) if bias is not None else torch.zeros(1, dtype=torch.bool)
    scores = (query @ key.mT * 0.25).masked_fill(hidden, torch.finfo(query.dtype).min)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ value


def of_everybody(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Rows that may attend nothing attend all alike."""
    hidden = (bias > 1) if bias is not None else torch.zeros(1, dtype=torch.bool)
    return (query @ key.mT * 0.25).masked_fill(hidden, torch.finfo(query.dtype).min).softmax(-1) @ value


def of_two_masks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """What both hide is hidden no more than what one does."""
    bias = torch.zeros(1) if bias is None else bias
    scores = (query @ key.mT * 0.25).masked_fill(bias > 1, -1e9)
    return scores.masked_fill((bias > 1).roll(1, -1), -1e9).softmax(-1) @ value


def of_large_scores(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Beside -1e8, as a float32, something is left of them."""
    bias = torch.zeros(1) if bias is None else bias
    return (query @ key.mT * 900).masked_fill(bias > 1, -1e8).softmax(-1) @ value


@pytest.mark.parametrize("attend", [of_nobody, of_everybody, of_two_masks, of_large_scores])
def test_rows_that_may_attend_nothing(attend: Attend) -> None:
    torch.manual_seed(0)
    model = Stack(Written(attend), Written(attend)).eval()
    biases = [torch.zeros(2, 1, 7, 7) for _ in range(3)]
    biases[1][1, :, 2] = biases[1][0, :, 3:, :4] = biases[1][0, :, 5:, 1:] = biases[2][:, :, 5:] = 2
    given = [(states(2, 7), bias) for bias in biases]
    expected = [run(model, *args) for args in given]
    accelerate_for_cpu(model, dtype="float32")
    for args, theirs in zip(given, expected, strict=True):
        for _ in range(2):
            assert error(run(model, *args), theirs) <= 1e-5
    assert len(in_use(model)) == 2


def by_key(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.mT * torch.arange(key.shape[-2])
    return scores.softmax(-1) @ value


def halved(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    weights = (query @ key.mT).softmax(-1)
    return weights @ value + weights.mean(-1, keepdim=True)


def of_columns(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return (query @ key.mT).softmax(-2) @ value


def scaled_behind_a_mask(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = (query @ key.mT).masked_fill(query.mean(-1, keepdim=True) > 0, -1e9)
    return (scores * 1e-9).softmax(-1) @ value


def capped_behind_a_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return ((query @ key.mT + query.mean(-1, keepdim=True)).tanh() * 2).softmax(-1) @ value


def capped_downwards(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return ((query @ key.mT).tanh() * -2).softmax(-1) @ value


LOOK_ALIKES = [by_key, halved, of_columns, scaled_behind_a_mask, capped_behind_a_bias, capped_downwards]


@pytest.mark.parametrize("attend", LOOK_ALIKES)
def test_what_only_looks_like_attention(attend: Attend) -> None:
    torch.manual_seed(0)
    model = Stack(Written(attend), Written(attend)).eval()
    given = [states(2, 7), states(2, 7), states(3, 9), states(1, 1)]
    expected = [run(model, hidden) for hidden in given]
    accelerate_for_cpu(model, dtype="float32")
    for hidden, theirs in zip(given, expected, strict=True):
        assert error(run(model, hidden), theirs) <= 1e-5
    assert not in_use(model)
