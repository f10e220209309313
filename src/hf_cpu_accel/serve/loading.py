"""From what the command line names to models in service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_cpu_accel.runtime.threads import apply_threads
from hf_cpu_accel.serve.encoders.encoder import Encoder, LoadedEncoder
from hf_cpu_accel.serve.encoders.loading import load_classifier, load_embedder, load_sentence_transformer
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.models import Served


@dataclass(frozen=True)
class Settings:
    """How models are loaded and batched.

    Attributes:
        accelerate: options of `accelerate_for_cpu`.
        batching: options of `Batcher`, for encoders.
    """

    accelerate: Mapping[str, Any] = field(default_factory=dict)
    batching: Mapping[str, Any] = field(default_factory=dict)


def load(argument: str, metrics: Metrics, settings: Settings) -> Served:
    """Load, accelerate and start one model: `MODEL`, or `NAME=MODEL` for clients to call it NAME.

    Raises:
        OSError: there is no such model.
        ValueError: it is of a kind that the server has no endpoint for, or one that needs a package which is not here.
    """
    name, separator, source = argument.partition("=")
    source = source if separator else argument
    return _KINDS[kind(source)](name if separator else source, source, metrics, settings)


def kind(source: str) -> str:
    """What the files of a model say that it is: one of `_KINDS`.

    Raises:
        OSError, ValueError: see `load`.
    """
    from transformers import AutoConfig

    if has_file(source, "modules.json"):
        return "sentence-transformer"
    config = AutoConfig.from_pretrained(source)
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "classifier"
    if architecture.endswith("Model") and not config.is_encoder_decoder:
        return "embedder"
    raise ValueError(
        f"{source} is a {architecture or config.model_type}: the server takes models of sentence-transformers, encoders, and "
        "classifiers of texts"
    )


def has_file(source: str, file: str) -> bool:
    """Whether the folder or repository has it, as far as that can be told from here."""
    from transformers.utils import cached_file

    try:
        return cached_file(source, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        return False


def _encoder(
    load: Callable[..., LoadedEncoder], name: str, source: str, metrics: Metrics, settings: Settings
) -> Encoder:
    loaded = load(name, source, **settings.accelerate)
    # Torch's count is of each thread that computes.
    prepare = partial(torch.set_num_threads, apply_threads(settings.accelerate.get("threads")).count)
    return Encoder(loaded, prepare=prepare, on_batch=metrics.on_batch(name), **settings.batching)


_KINDS: dict[str, Callable[[str, str, Metrics, Settings], Served]] = {
    "sentence-transformer": partial(_encoder, load_sentence_transformer),
    "classifier": partial(_encoder, load_classifier),
    "embedder": partial(_encoder, load_embedder),
}
