"""Tasks on text."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers.decision import DecisionConfig

from tests.tasks.case import BAD_TEXTS, TEXTS, Case, call, characters, picture, random_model, wordpiece

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_ENTAILMENT = {0: "contradiction", 1: "neutral", 2: "entailment"}


def _pipe(task: str, model: Any, tokenizer: Any, **options: Any) -> Any:
    return tf.pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **options)


def _config(name: str, tokenizer: Any, **settings: Any) -> Any:
    return getattr(tf, name)(vocab_size=len(tokenizer), **{**_TINY, **settings})


def _bert(task: str, model: str, **settings: Any) -> Any:
    return _pipe(task, random_model(model, _config("BertConfig", wordpiece(), **settings)), wordpiece())


def _distilbert() -> Any:
    config = tf.DistilBertConfig(vocab_size=len(wordpiece()), dim=64, n_layers=2, n_heads=4, hidden_dim=128)
    return random_model("DistilBertModel", config)


def _llama() -> Any:
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = _config("LlamaConfig", characters(), num_key_value_heads=2, **special)
    return random_model("LlamaForCausalLM", config)


def _entailment() -> Any:
    label2id = {label: number for number, label in _ENTAILMENT.items()}
    settings = {"id2label": _ENTAILMENT, "label2id": label2id}
    return _bert("zero-shot-classification", "BertForSequenceClassification", **settings)


def _document_questions() -> Any:
    model = random_model("LayoutLMForQuestionAnswering", _config("LayoutLMConfig", wordpiece()))
    return _pipe("document-question-answering", model, wordpiece())


def _decision() -> Any:
    labels = DecisionConfig(labels={"noul": ["Y", "N"]})  # one token each, as the pipeline wants them
    return _pipe("decision", _llama(), characters(), decision_config=labels)


class _Table(dict[str, Any]):
    """As much of a pandas table as the pipeline reads."""

    empty = False


def _one_question(table: _Table, query: str, **unused: Any) -> list[dict[str, Any]]:
    return [{"table": table, "query": query}]


class _TableTokenizer:
    """Queries and cells as TAPAS's tokenizer lays them out, and from its scores the cells above one half."""

    def __call__(self, table: _Table, query: str, **unused: Any) -> Any:
        rows = [list(table), *zip(*table.values(), strict=True)]
        inputs = [(token, 0, 0, 0) for token in wordpiece()(query)["input_ids"]]
        for row, cells in enumerate(rows):
            for column, cell in enumerate(cells):
                tokens = wordpiece()(cell, add_special_tokens=False)["input_ids"]
                inputs += [(token, 1, column + 1, row) for token in tokens]
        ids = torch.tensor([[place[0] for place in inputs]])
        types = torch.zeros(1, len(inputs), 7, dtype=torch.long)
        types[0, :, :3] = torch.tensor([place[1:] for place in inputs])
        return tf.BatchEncoding(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": types}
        )

    def convert_logits_to_predictions(self, inputs: Any, logits: Any, aggregations: Any) -> Any:
        return [[]], aggregations.argmax(-1).tolist()


def _table_questions() -> Any:
    sums = {"num_aggregation_labels": 3, "aggregation_labels": {0: "NONE", 1: "SUM", 2: "COUNT"}}
    config = _config("TapasConfig", wordpiece(), **sums)
    model = random_model("TapasForQuestionAnswering", config)
    return _pipe("table-question-answering", model, _TableTokenizer(), args_parser=_one_question)


_TABLE = _Table(name=["Anna", "Bert"], age=["7", "9"])
_WORDS = [
    (word, [60 * place, 10, 60 * place + 50, 30])
    for place, word in enumerate(["the", "sum", "is", "12", "euro"])
]
_REQUEST = {
    "state": "I was charged twice.",
    "questions": {
        "refund": {"type": "noul", "instructions": "Is a refund asked for?"},
        "tone": {
            "type": "choice",
            "instructions": "The tone?",
            "criteria": {"calm": "polite", "angry": None},
        },
    },
}

CASES = {
    "feature-extraction": Case(
        "DistilBERT",
        lambda: _pipe("feature-extraction", _distilbert(), wordpiece()),
        [call(TEXTS, return_tensors=True)],
        BAD_TEXTS,
    ),
    "text-classification": Case(
        "BERT",
        lambda: _bert("text-classification", "BertForSequenceClassification"),
        [call(TEXTS, top_k=None), call(TEXTS, batch_size=2)],
        BAD_TEXTS,
    ),
    "token-classification": Case(
        "BERT",
        lambda: _bert("token-classification", "BertForTokenClassification"),
        [call(TEXTS)],
        BAD_TEXTS,
    ),
    "fill-mask": Case(
        "BERT",
        lambda: _bert("fill-mask", "BertForMaskedLM"),
        [call("It rained all [MASK].")],
        {**BAD_TEXTS, "nothing masked": call("It rained.")},
    ),
    "zero-shot-classification": Case(
        "BERT",
        _entailment,
        [call(TEXTS, candidate_labels=["weather", "travel"])],
        {
            "no labels": call("It rained.", candidate_labels=[]),
            "empty": call("", candidate_labels=["weather"]),
        },
    ),
    "table-question-answering": Case(
        "TAPAS",
        _table_questions,
        [call(_TABLE, "How old is Anna?")],
        {"no question": call(_TABLE, "")},
    ),
    "document-question-answering": Case(
        "LayoutLM",
        _document_questions,
        [call(picture(), "What is the sum?", word_boxes=_WORDS)],
        {
            "no words": call(picture(), "What is the sum?", word_boxes=[]),
            "no question": call(picture(), "", word_boxes=_WORDS),
        },
    ),
    "text-generation": Case(
        "Llama",
        lambda: _pipe("text-generation", _llama(), characters()),
        [call(TEXTS, max_new_tokens=8, do_sample=False)],
        {"no new tokens": call("It", max_new_tokens=0), **BAD_TEXTS},
    ),
    "decision": Case(
        "Llama",
        _decision,
        [call(_REQUEST)],
        {"no questions": call({"state": "It rained."}), "no JSON": call("It rained.")},
    ),
}
