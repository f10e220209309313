"""Small random models with tokenizers, written to folders as published ones are."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = "time year people way day man thing woman life child world school state family student group".split()  # noqa: SIM905
POSITIONS = 24


def save_embedder(folder: Path) -> Path:
    """A BERT without a head."""
    return _save(BertModel, folder, 0)


def save_classifier(folder: Path, labels: list[str], problem_type: str | None = None) -> Path:
    """A BERT that knows `labels`."""
    return _save(BertForSequenceClassification, folder, 1, labels, problem_type)


def _save(
    model: type, folder: Path, seed: int, labels: list[str] | None = None, problem_type: str | None = None
) -> Path:
    names = (
        {}
        if labels is None
        else {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    )
    config = BertConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        problem_type=problem_type,
        **names,
    )
    torch.manual_seed(seed)
    built = model(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.3)
    built.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word, an id; BERT's special tokens."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


# A template that has a place for tools and for an answer's format, and one that has neither.
CHAT = (
    "{% if tools %}tools:{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% if response_format %}json;{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PLAIN_CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


def writer(positions: int = 96, end: int | None = 0, vocabulary: int = 94) -> LlamaForCausalLM:
    """A Llama that goes on with printable bytes (256: with any); what it says is noise, the same each time. `!` ends an answer."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


def byte_tokenizer(template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """A byte, an id; those of printable ASCII are the first 94."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer
