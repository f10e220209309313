"""Tables that change, are parametrized, tied, copied or empty while their embeddings are accelerated."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.rewrite.encoder.embeddings import FusedEmbeddings
from tests.rewrite.encoder.embedding_cases import SIZES, VOCABULARY, build, counted


def test_tables_may_change_while_accelerated() -> None:
    model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
    accelerate_for_cpu(model, dtype="float32")
    original = copy.deepcopy(restore(copy.deepcopy(model))).embeddings

    def assert_same() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model.embeddings(ids), original(ids), rtol=1e-6, atol=1e-6)

    with torch.no_grad():
        for embeddings in (model.embeddings, original):
            embeddings.word_embeddings.weight.mul_(2)
            embeddings.LayerNorm.bias.add_(1)
    assert_same()
    model.resize_token_embeddings(VOCABULARY + 8)
    ids[0, 0] = VOCABULARY + 7
    original.word_embeddings = copy.deepcopy(model.get_input_embeddings())
    assert_same()

    class Doubled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for embeddings in (model.embeddings, original):
        torch.manual_seed(1)
        embeddings.word_embeddings = Doubled(VOCABULARY + 8, 64)
    assert_same()
    restore(model)
    assert isinstance(model.get_input_embeddings(), Doubled)


def test_parametrized_tables_are_computed() -> None:
    class Negated(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return -weight

    for when in ("before", "after"):
        model, ids = build(), torch.randint(4, VOCABULARY, (2, 7))
        if when == "before":
            parametrize.register_parametrization(model.embeddings.word_embeddings, "weight", Negated())
        model.eval()
        accelerate_for_cpu(model, dtype="float32")
        if when == "after":
            parametrize.register_parametrization(model.embeddings.word_embeddings, "weight", Negated())
        with torch.no_grad():
            got = model.embeddings(ids)
            restore(model)
            torch.testing.assert_close(got, model.embeddings(ids))


def test_copies_and_pickles_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("roberta"), torch.randint(4, VOCABULARY, (2, 7))
    with torch.no_grad():
        before = model.embeddings(ids)
        accelerate_for_cpu(model, dtype="float32", originals="memory")
        accelerated = model.embeddings(ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with counted(monkeypatch) as served:
                assert torch.equal(twin.embeddings(ids), accelerated)
                twin.embeddings.word_embeddings.weight.zero_()
                assert not torch.equal(twin.embeddings(ids), accelerated)
            assert len(served) == 2
            assert torch.equal(model.embeddings(ids), accelerated)
        restore(model)
        assert torch.equal(model.embeddings(ids), before)


def test_a_tied_table_stays_tied() -> None:
    config = tf.BertConfig(**SIZES)
    model, ids = tf.BertForMaskedLM(config).eval(), torch.randint(4, VOCABULARY, (2, 7))
    with torch.no_grad():
        before = model(ids).logits
        accelerate_for_cpu(model, dtype="float32")
        assert isinstance(model.bert.embeddings, FusedEmbeddings)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
        restore(model)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert torch.equal(model(ids).logits, before)


def test_a_table_without_rows_is_no_reason_to_fail() -> None:
    model = tf.BertModel(tf.BertConfig(**SIZES, type_vocab_size=0)).eval()
    assert not isinstance(accelerate_for_cpu(model, dtype="float32").embeddings, FusedEmbeddings)
