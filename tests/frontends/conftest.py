"""A small checkpoint, and a recorder in place of acceleration."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

from hf_cpu_accel import api
from hf_cpu_accel.frontends import import_hook

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]


@pytest.fixture
def installed():
    """The suite's installation, or one of our own where another test took it back."""
    import_hook.install()
    yield
    import_hook.install()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A two-layer BERT classifier with its tokenizer, saved as a checkpoint."""
    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        num_labels=3,
    )
    BertForSequenceClassification(config).save_pretrained(path)
    vocabulary = path / "words.txt"
    vocabulary.write_text("\n".join(WORDS))
    BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(path)
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    """Records (target, config) of each acceleration instead of doing it."""
    made = []

    def record(target, config=None, **options):
        made.append((target, config))
        return target

    monkeypatch.setattr(api, "accelerate_for_cpu", record)
    return made
