"""Vocabulary heads that share a float32 weight with an embedding: one weight in memory, and a product of this package."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.linear import shared
from hf_cpu_accel.rewrite.linear.shared import STRUCTURE, SharedLinear

VOCABULARY = 300


def model_of(**changed: Any) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        **changed,
    )
    return BertForMaskedLM(config).eval()


def ids(length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many, of each product of ours with a weight that is not packed."""
    made: list[int] = []
    own = shared._is_ours

    def noted(input: Tensor, *weight_and_bias: Any) -> bool:
        takes = own(input, *weight_and_bias)
        made.extend([input.shape[:-1].numel()] if takes else [])
        return takes

    monkeypatch.setattr(shared, "_is_ours", noted)
    return made


@torch.no_grad()
def test_the_product_is_ours_and_the_weight_stays_one(rows: list[int]) -> None:
    model = model_of()
    own = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    head = model.cls.predictions.decoder
    assert isinstance(head, SharedLinear)
    assert isinstance(head, nn.Linear)
    assert head.weight is model.bert.embeddings.word_embeddings.weight
    item = next(item for item in explain(model).items if item.name == "cls.predictions.decoder")
    assert (item.structure, item.op, item.dtype, item.packed_bytes) == (STRUCTURE, "linear", "float32", 0)
    rows.clear()
    for length in (1, 4, 5, 70):
        expected = own(ids(length)).logits
        assert (model(ids(length)).logits - expected).norm() <= 1e-4 * expected.norm()
    assert set(rows) == {1, 4, 5, 70}
    restore(model)
    assert type(model.cls.predictions.decoder) is nn.Linear
    assert torch.equal(model(ids(70)).logits, own(ids(70)).logits)


@torch.no_grad()
def test_what_is_written_to_the_embedding_counts_at_once() -> None:
    model = accelerate_for_cpu(model_of(), dtype="float32")
    before = model(ids(70)).logits
    model.cls.predictions.decoder.weight.data[7] += torch.randn(64)
    own = copy.deepcopy(model)
    restore(own)
    expected = own(ids(70)).logits
    assert (model(ids(70)).logits - expected).norm() <= 1e-4 * expected.norm()
    assert (before - expected).norm() > 1e-3 * expected.norm()


def test_gradients_reach_the_input() -> None:
    """Prompts are tuned beside frozen weights."""
    model = accelerate_for_cpu(model_of(), dtype="float32")
    states = torch.randn(1, 40, 64, requires_grad=True)
    model.cls.predictions.decoder(states).sum().backward()
    assert states.grad is not None
    bias = model.cls.predictions.decoder.bias.requires_grad_()
    model.cls.predictions.decoder(torch.randn(1, 40, 64)).sum().backward()
    assert bias.grad is not None
    with torch.no_grad():
        assert not model.cls.predictions.decoder(states).requires_grad


@torch.no_grad()
def test_a_vocabulary_may_grow_meanwhile() -> None:
    model = accelerate_for_cpu(model_of(), dtype="float32")
    model.resize_token_embeddings(VOCABULARY + 20)
    assert model(ids(70)).logits.shape[-1] == VOCABULARY + 20
    restore(model)
    head = model.cls.predictions.decoder
    assert head.out_features == head.weight.shape[0] == VOCABULARY + 20


def test_other_weights_are_packed_or_left_as_before() -> None:
    apart = accelerate_for_cpu(model_of(tie_word_embeddings=False), dtype="float32")
    assert not isinstance(apart.cls.predictions.decoder, SharedLinear)
    narrow = accelerate_for_cpu(model_of(), dtype="int8")
    assert not isinstance(narrow.cls.predictions.decoder, SharedLinear)
    turned = model_of()
    turned.bert.embeddings.word_embeddings.weight.data = torch.randn(64, VOCABULARY).T
    for left in (model_of().bfloat16(), turned):
        accelerate_for_cpu(left, dtype="float32")
        reason = next(i.reason for i in explain(left).items if i.name == "cls.predictions.decoder")
        assert "shares its weight" in str(reason)
