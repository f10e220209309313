"""The requests of text-embeddings-inference. Types are strict: values of another type are rejected, not converted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hf_cpu_accel.serve.encoders.tokenizing import Text


def texts(value: Any) -> list[Text]:
    """Return a list of texts from one text, texts, the token ids of one text, or the token ids of several texts."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _is_ids(one) for one in value):
        return value
    raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists")


def is_one(value: Any) -> bool:
    """Return whether the inputs of `/predict` are one text or one pair instead of a batch."""
    return isinstance(value, str) or (_all_texts(value) and len(value) == 2)


def texts_or_pairs(value: Any) -> list[Text]:
    """Return a list of texts and pairs from one text, one pair, or a batch: a list of lists of one or two texts."""
    if is_one(value):
        return [_text_or_pair(value)]
    if isinstance(value, list) and value and all(_all_texts(one) and len(one) in (1, 2) for one in value):
        return [_text_or_pair(one) for one in value]
    raise ValueError("expected a text, a pair [text, text], or a batch: a list of [text] and [text, text]")


def _text_or_pair(value: Any) -> Text:
    if isinstance(value, str):
        return value
    return value[0] if len(value) == 1 else (value[0], value[1])


def _all_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _check_pairs(value: Any) -> Any:
    texts_or_pairs(value)
    return value


Texts = Annotated[Any, BeforeValidator(texts)]
TextsOrPairs = Annotated[Any, BeforeValidator(_check_pairs)]


class EncoderRequest(BaseModel):
    """The common fields. `model` is an extension for servers with several models."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    truncate: bool | None = False
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


class EmbedRequest(EncoderRequest):
    """The body of `POST /embed`."""

    inputs: Texts
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class RerankRequest(EncoderRequest):
    """The body of `POST /rerank`."""

    query: Annotated[str, Field(min_length=1)]
    texts: Annotated[list[str], Field(min_length=1)]
    raw_scores: bool = False
    return_text: bool = False


class PredictRequest(EncoderRequest):
    """The body of `POST /predict`."""

    inputs: TextsOrPairs
    raw_scores: bool = False
