"""Load the models of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_cpu_accel.api import accelerate_for_cpu
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends.gguf import located, split_path
from hf_cpu_accel.runtime.threads import apply_threads
from hf_cpu_accel.serve.encoders.encoder import Encoder, LoadedEncoder
from hf_cpu_accel.serve.encoders.loading import load_classifier, load_embedder, load_sentence_transformer
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.instances.placement import threads_of_an_instance
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Served
from hf_cpu_accel.serve.speech.transcriber import Transcriber


@dataclass(frozen=True)
class Settings:
    """Options of the models.

    Attributes:
        accelerate: options of `accelerate_for_cpu`.
        batching: options of `Batcher`, for encoders.
        engine: options of `Engine`, for language models.
    """

    accelerate: Mapping[str, Any] = field(default_factory=dict)
    batching: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def load(argument: str, metrics: Metrics, settings: Settings) -> Served:
    """Load, accelerate and start one model.

    Args:
        argument: `MODEL`, or `NAME=MODEL` to serve it under NAME.
        metrics: the metrics of the server.
        settings: options of the models.

    Raises:
        OSError: no such model.
        ValueError: the server has no endpoint for the model, or a package that it needs is not installed.
        RuntimeError: the model is a packed folder of another dtype.
    """
    source = argument.partition("=")[2] or argument
    return _KINDS[kind(source)](called(argument), source, metrics, settings)


def called(argument: str) -> str:
    """Return the name under which a MODEL of the command line is served."""
    return argument.partition("=")[0]


def kind(source: str) -> str:
    """Return the kind of a model, one of `_KINDS`, from its files.

    Raises:
        OSError, ValueError: see `load`.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as auto

    if split_path(source) is not None:
        return "language model"  # transformers loads only these from GGUF files
    if has_file(source, "modules.json"):
        return "sentence-transformer"
    config = AutoConfig.from_pretrained(source)
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "classifier"
    if architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "language model"
    speech = auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, auto.MODEL_FOR_CTC_MAPPING_NAMES
    if any(architecture in names.values() for names in speech):
        return "speech recognizer"
    if architecture in auto.MODEL_MAPPING_NAMES.values() and not config.is_encoder_decoder:
        return "embedder"
    raise ValueError(
        f"{source} is a {architecture or config.model_type}, which the server does not support; accepted are models of "
        "sentence-transformers, encoders, text classifiers, causal language models and speech recognizers"
    )


def has_file(source: str, file: str) -> bool:
    """Return whether the folder or the repository has this file; False if that is unknown."""
    from transformers.utils import cached_file

    try:
        return cached_file(source, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        return False


def _encoder(
    load: Callable[..., LoadedEncoder], name: str, source: str, metrics: Metrics, settings: Settings
) -> Encoder:
    loaded = load(name, source, **settings.accelerate)
    threads = apply_threads(settings.accelerate.get("threads")).count
    return Encoder(
        loaded,
        workers=threads // threads_of_an_instance(threads),
        prepare=_threads(settings),
        on_batch=metrics.on_batch(name),
        **settings.batching,
    )


def _language_model(name: str, source: str, metrics: Metrics, settings: Settings) -> Served:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, options = located(source)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    accel = CPUAccelConfig(originals="drop", **settings.accelerate)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", cpu_optimize=accel, **options).eval()
    observe = metrics.first_token.labels(name).observe
    return LanguageModel(name, model, tokenizer, on_first=observe, **settings.engine)


def _speech_recognizer(name: str, source: str, metrics: Metrics, settings: Settings) -> Served:
    from transformers import pipeline

    recognize = pipeline("automatic-speech-recognition", model=source, device="cpu")
    accelerate_for_cpu(recognize, originals="drop", **settings.accelerate)
    return Transcriber(name, recognize, prepare=_threads(settings))


def _threads(settings: Settings) -> Callable[[int], object]:
    """Return a function that sets the number of torch threads of the calling thread to its share among the busy workers."""
    count = apply_threads(settings.accelerate.get("threads")).count
    return lambda computing: torch.set_num_threads(max(1, count // computing))


_KINDS: dict[str, Callable[[str, str, Metrics, Settings], Served]] = {
    "sentence-transformer": partial(_encoder, load_sentence_transformer),
    "classifier": partial(_encoder, load_classifier),
    "embedder": partial(_encoder, load_embedder),
    "language model": _language_model,
    "speech recognizer": _speech_recognizer,
}
