"""The tasks of texts: how each pipeline is built, and the numbers that it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.acceptance.tokenizers import SENTENCES, byte_bpe, unigram, wordpiece

TEXTS = [SENTENCES[i] for i in (0, 6, 17, 60, 121, 230, 231)]  # 3 to 60 words
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
ENTAILMENT = {0: "contradiction", 1: "neutral", 2: "entailment"}
Target = Any
Run = Callable[[Target], list[Tensor]]


def build(cls: type, config: Any, seed: int = 0) -> Any:
    """A random model whose outputs differ between inputs and labels: weights as large as in a trained
    model."""
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def config(cls: type, tokenizer: Any, **options: Any) -> Any:
    given = {
        **TINY,
        "max_position_embeddings": 160,
        "initializer_range": 0.12,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return cls(vocab_size=len(tokenizer), **{**given, **options})


def in_batches(pipe: Any, texts: Any, **options: Any) -> list[Any]:
    """One by one, then in padded batches of three, then of all."""
    return [
        *pipe(texts, **options),
        *pipe(texts, batch_size=3, **options),
        *pipe(texts, batch_size=len(texts), **options),
    ]


def text_classification() -> Target:
    model = build(tf.RobertaForSequenceClassification, config(tf.RobertaConfig, byte_bpe(), num_labels=4))
    return tf.pipeline("text-classification", model=model, tokenizer=byte_bpe(), device="cpu")


def run_text_classification(pipe: Any) -> list[Tensor]:
    results = in_batches(pipe, TEXTS, top_k=None)
    return [
        torch.tensor([s["score"] for s in sorted(scores, key=lambda s: s["label"])]) for scores in results
    ]


def token_classification() -> Target:
    model = build(
        tf.ElectraForTokenClassification,
        config(tf.ElectraConfig, wordpiece(), num_labels=5, embedding_size=32),
    )
    return tf.pipeline(
        "token-classification", model=model, tokenizer=wordpiece(), device="cpu", ignore_labels=[]
    )


def run_token_classification(pipe: Any) -> list[Tensor]:
    results = in_batches(pipe, TEXTS)
    assert [len(result) for result in results[: len(TEXTS)]] == [
        len(wordpiece()(text)["input_ids"]) - 2 for text in TEXTS
    ]
    return [torch.tensor([word["score"] for word in result]) for result in results]


def fill_mask() -> Target:
    settings = config(tf.BertConfig, wordpiece())
    return tf.pipeline(
        "fill-mask", model=build(tf.BertForMaskedLM, settings), tokenizer=wordpiece(), device="cpu"
    )


def run_fill_mask(pipe: Any) -> list[Tensor]:
    texts = [f"{text} It was [MASK] again." for text in TEXTS]
    results = in_batches(pipe, texts, targets=["good", "rain", "train", "music", "science"])
    return [
        torch.tensor([s["score"] for s in sorted(scores, key=lambda s: s["token"])]) for scores in results
    ]


def feature_extraction() -> Target:
    settings = config(tf.MPNetConfig, wordpiece(), pad_token_id=1)
    model = build(tf.MPNetModel, settings)
    return tf.pipeline("feature-extraction", model=model, tokenizer=wordpiece(), device="cpu")


def run_feature_extraction(pipe: Any) -> list[Tensor]:
    return [result[0] for result in pipe(TEXTS, return_tensors=True)]


def zero_shot() -> Target:
    labels = {"id2label": ENTAILMENT, "label2id": {label: i for i, label in ENTAILMENT.items()}}
    settings = config(
        tf.DebertaV2Config,
        wordpiece(),
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=32,
        **labels,
    )
    # Of seeds 0 to 7 the one that rounding to bfloat16 moves least, also in torch's own (0.021; seed 0: 0.042; seed 6: 0.088).
    model = build(tf.DebertaV2ForSequenceClassification, settings, seed=3)
    model.classifier.weight.data.mul_(8)  # labels of a random model are hardly told apart otherwise
    return tf.pipeline("zero-shot-classification", model=model, tokenizer=wordpiece(), device="cpu")


def run_zero_shot(pipe: Any) -> list[Tensor]:
    results = in_batches(pipe, TEXTS, candidate_labels=["weather", "travel", "cooking"])
    return [torch.tensor([s for _, s in sorted(zip(r["labels"], r["scores"], strict=True))]) for r in results]


PAIRS = list(zip(TEXTS, reversed(TEXTS), strict=True))


def batches(tokenizer: Any) -> list[Any]:
    """Sentence pairs: each alone, and all in one padded batch."""
    groups = [[pair] for pair in PAIRS] + [PAIRS]
    encode = {"padding": True, "truncation": True, "max_length": 150, "return_tensors": "pt"}
    return [tokenizer([a for a, _ in group], [b for _, b in group], **encode) for group in groups]


def question_answering() -> Target:
    settings = tf.DistilBertConfig(
        vocab_size=len(wordpiece()),
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=160,
        initializer_range=0.12,
    )
    return build(tf.DistilBertForQuestionAnswering, settings)


def run_question_answering(model: Any) -> list[Tensor]:
    outputs = []
    for batch in batches(wordpiece()):
        batch.pop("token_type_ids", None)
        result = model(**batch)
        # The logits at padding mean nothing: an answer may not lie there.
        attended = batch["attention_mask"].bool()
        outputs += [logits[attended] for logits in (result.start_logits, result.end_logits)]
    return outputs


def multiple_choice() -> Target:
    return build(tf.AlbertForMultipleChoice, config(tf.AlbertConfig, unigram(), embedding_size=32))


def run_multiple_choice(model: Any) -> list[Tensor]:
    outputs = []
    for question, length in ((TEXTS[1], 40), (TEXTS[3], 120)):
        choices = TEXTS[2:6]
        batch = unigram()(
            [question] * len(choices),
            choices,
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        outputs.append(model(**{name: tensor.unsqueeze(0) for name, tensor in batch.items()}).logits)
    return outputs


def next_sentence() -> Target:
    return build(tf.BertForNextSentencePrediction, config(tf.BertConfig, wordpiece()))


def run_next_sentence(model: Any) -> list[Tensor]:
    return [model(**batch).logits for batch in batches(wordpiece())]


@dataclass(frozen=True)
class Case:
    """A task: how to build its pipeline or model, and how to run it on inputs of many shapes.

    error: the largest |output - expected| / max |expected| that is accepted, (bfloat16, int8). About four
        times what was measured, and far less than the outputs for different inputs differ from each other.
    """

    build: Callable[[], Target]
    run: Run
    error: tuple[float, float]


CASES = {
    "text-classification": Case(text_classification, run_text_classification, (0.008, 0.06)),
    "token-classification": Case(token_classification, run_token_classification, (0.015, 0.06)),
    "fill-mask": Case(fill_mask, run_fill_mask, (0.03, 0.2)),
    "feature-extraction": Case(feature_extraction, run_feature_extraction, (0.02, 0.1)),
    "zero-shot-classification": Case(zero_shot, run_zero_shot, (0.01, 0.15)),
    "question-answering": Case(question_answering, run_question_answering, (0.02, 0.1)),
    "multiple-choice": Case(multiple_choice, run_multiple_choice, (0.05, 0.25)),
    "next-sentence": Case(next_sentence, run_next_sentence, (0.12, 0.5)),
}
