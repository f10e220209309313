"""pytest plugin: what sentence-transformers' own tests expect around them, on a machine without network.

That is the tiny models of the hub that most of them load. Stand-ins with random weights lie in a cache of the hub in a temporary
folder, so that every `from_pretrained` finds them. A test that compares with numbers of the originals fails, with acceleration and
without.
"""

from __future__ import annotations

import os
import string
import tempfile
from pathlib import Path

_CACHE = tempfile.TemporaryDirectory(prefix="hub-")  # goes away with the process
os.environ["HF_HUB_CACHE"] = _CACHE.name  # read when huggingface_hub is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)

_SIZE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
_WORDS = (
    "this",
    "is",
    "a",
    "the",
    "how",
    "many",
    "people",
    "live",
    "in",
    "berlin",
    "sentence",
    "test",
    "weather",
)


def _folder(name: str) -> Path:
    """Where the hub's cache has the newest version of `name`."""
    model = Path(_CACHE.name, f"models--{name.replace('/', '--')}")
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    return model / "snapshots" / ("0" * 40)


def _bert(kind: type, **options: int) -> str:
    """A folder with a tiny BERT and its tokenizer."""
    folder = tempfile.mkdtemp(dir=_CACHE.name)
    letters = string.ascii_lowercase + string.digits + string.punctuation
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = dict.fromkeys((*special, *letters, *(f"##{letter}" for letter in letters), *_WORDS))
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizerFast(vocab=vocabulary, do_lower_case=True, model_max_length=512).save_pretrained(folder)
    kind(BertConfig(vocab_size=30522, **_SIZE, **options)).save_pretrained(folder)
    return folder


def _make() -> None:
    torch.manual_seed(0)
    transformer = Transformer(_bert(BertModel))
    pooling = Pooling(transformer.get_embedding_dimension())
    for name in ("sentence-transformers-testing/stsb-bert-tiny-safetensors",):
        SentenceTransformer(modules=[transformer, pooling]).save(str(_folder(name)))
    reranker = CrossEncoder(_bert(BertForSequenceClassification, num_labels=1))
    reranker.save_pretrained(str(_folder("cross-encoder-testing/reranker-bert-tiny-gooaq-bce")))
    splade = SparseEncoder(modules=[MLMTransformer(_bert(BertForMaskedLM)), SpladePooling("max")])
    splade.save(str(_folder("sparse-encoder-testing/splade-bert-tiny-nq")))


_make()
