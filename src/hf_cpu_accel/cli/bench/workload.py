"""The workload of `hf-cpu-accel bench`: a model with the head of a task, and one batch of inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import float_tensors
from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.loading import Load, blocks_of, load_eager, model_to_accelerate
from hf_cpu_accel.frontends.gguf import split_path

_SEQUENCE_CLASSIFICATION = ("AutoModelForSequenceClassification", ("logits",))
# task -> (auto class that decides the head, names of the outputs to compare)
_TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "feature-extraction": ("AutoModel", ("last_hidden_state",)),
    "fill-mask": ("AutoModelForMaskedLM", ("logits",)),
    "question-answering": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    "sentence-similarity": ("SentenceTransformer", ("sentence_embedding",)),
    "text-classification": _SEQUENCE_CLASSIFICATION,
    "token-classification": ("AutoModelForTokenClassification", ("logits",)),
    "zero-shot-classification": _SEQUENCE_CLASSIFICATION,
}
TEXT_GENERATION = "text-generation"  # see generation_workload.py
TASKS = (*_TASKS, TEXT_GENERATION)


@dataclass(frozen=True)
class Workload:
    """A model, a task and a batch shape.

    Attributes:
        title: name of the model.
        task: one of `TASKS`, except `TEXT_GENERATION`.
        batch: sequences per call.
        seq: tokens per sequence.
        build: builds the model.
        blocks: loads a GGUF file with its weights in blocks; None for other models.
    """

    title: str
    task: str
    batch: int
    seq: int
    build: Callable[[], nn.Module]
    blocks: Load | None = None

    def to_accelerate(self, eager: nn.Module) -> nn.Module:
        """Return the model to accelerate and compare with `eager`, the result of `build`."""
        accelerated: nn.Module = model_to_accelerate(eager, self.blocks)
        return accelerated

    @property
    def facts(self) -> dict[str, object]:
        """Return the description of the workload for JSON."""
        return {"model": self.title, "task": self.task, "batch": self.batch, "seq": self.seq}

    def __str__(self) -> str:
        return f"{self.title}, {self.task}, {self.batch} x {self.seq} tokens"

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Return random token ids and a full attention mask, both int64 [batch, seq], the same for the same seed.

        Raises:
            ValueError: the model has fewer positions than tokens.
        """
        limit = _longest_sequence(model)
        if limit is not None and self.seq > limit:
            raise ValueError(
                f"seq={self.seq}: the model has positions for {limit} tokens; pass {limit} or fewer"
            )
        vocab = _vocabulary_size(model)
        generator = torch.Generator().manual_seed(seed)
        # In published vocabularies the special tokens (padding, mask, end) have the first ids.
        low = 1000 if vocab > 2000 else 0
        ids = torch.randint(low, vocab, (self.batch, self.seq), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Return the float outputs of the task, without gradients."""
        with torch.inference_mode():
            # SentenceTransformer expects its features as one mapping, to which it adds its results.
            output: Any = model(dict(inputs)) if self.task == "sentence-similarity" else model(**inputs)
        return float_tensors([output[name] for name in _TASKS[self.task][1]])


def workload(model: str | None, random_config: str | None, task: str, batch: int, seq: int) -> Workload:
    """Check the arguments of the command line and return the workload. Nothing is loaded.

    Raises:
        ValueError: a wrong argument; the message contains the remedy.
    """
    if task not in _TASKS:
        raise ValueError(f"task={task!r} is unknown; accepted: {', '.join(TASKS)}")
    title = source_title(model, random_config)
    if batch < 1 or seq < 1:
        raise ValueError(f"batch={batch}, seq={seq}: both must be at least 1")
    auto_class = _TASKS[task][0]
    if random_config is not None:
        if auto_class == "SentenceTransformer":
            raise ValueError(
                "task='sentence-similarity' is not supported with --random-config; pass MODEL, or use feature-extraction"
            )
        name = random_config
        return Workload(title, task, batch, seq, lambda: random_models.build(name, auto_class))
    assert model is not None
    if auto_class == "SentenceTransformer" and split_path(model) is not None:
        raise ValueError(
            f"task={task!r} is not supported for GGUF files, which have no sentence-transformers modules; accepted: "
            f"feature-extraction, {TEXT_GENERATION}"
        )
    path = model
    return Workload(title, task, batch, seq, lambda: _load(path, auto_class), blocks_of(path, auto_class))


def source_title(model: str | None, random_config: str | None) -> str:
    """Return the name of the model in results: the last part of a path, or the architecture and "(random weights)".

    Raises:
        ValueError: both or none of the two is None, or an unknown `random_config`.
    """
    if (model is None) == (random_config is None):
        raise ValueError("pass either MODEL (an id or a local folder) or --random-config NAME")
    if model is not None:
        return os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model
    if random_config not in random_models.NAMES:
        raise ValueError(
            f"random_config={random_config!r} is unknown; accepted: {', '.join(random_models.NAMES)}"
        )
    return f"{random_config} (random weights)"


def _load(model: str, auto_class: str) -> nn.Module:
    if auto_class == "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(model, device="cpu").float().eval()
    loaded: nn.Module = load_eager(model, auto_class, torch.float32)
    return loaded


def _vocabulary_size(model: nn.Module) -> int:
    for module in model.modules():  # the transformer of a SentenceTransformer is a child
        size = getattr(getattr(module, "config", None), "vocab_size", None)
        if isinstance(size, int):
            return size
    raise ValueError(
        f"{type(model).__name__} has no vocab_size; bench supports models that read token ids, report supports others"
    )


def _longest_sequence(model: nn.Module) -> int | None:
    """Return the number of learned positions; None without learned positions (relative or rotary ones)."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and similar models start positions after the row of padding.
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - reserved
    return None
