"""The first small model of a type that can be built and called, and its calls with and without padding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.architectures.inputs import Maker, padded
from tests.architectures.models import build, classes_of
from tests.architectures.small import small_configs

SEARCH = float(os.environ.get("ARCHITECTURES_SECONDS", "5"))  # of CPU time for finding a config and a call
Found = tuple[PreTrainedModel, dict[str, Any], str]
Outputs = dict[str, Tensor]


def find_model(model_type: str) -> Found | list[str]:
    """Return the first small model of a type that can be built and called. See `search`."""
    return search(small_configs(model_type), lambda config: classes_of(model_type, config)[:2])


def search(
    configs: Iterator[tuple[str, PretrainedConfig]],
    classes: Callable[[PretrainedConfig], list[type[PreTrainedModel]]],
) -> Found | list[str]:
    """Return the first model that can be built and called, its batch and the name of its config; or the errors, one per attempt.

    Args:
        configs: (name, config) in the order of the attempts.
        classes: returns the classes to build from a config.
    """
    reasons: list[str] = []
    until = time.process_time() + SEARCH
    for recipe, config in _valid(configs, reasons):
        found = classes(config)
        if not found:
            return ["no model class is built from this config"]
        for cls in found:
            try:
                model = build(cls, config)
            except Exception as error:
                reasons.append(f"{cls.__name__} ({recipe}) is not built: {told(error)}")
                if isinstance(error, ImportError) or time.process_time() > until:
                    return reasons
                continue
            for batch in Maker(model).batches():
                if time.process_time() > until:
                    return [*reasons, f"nothing was found in {SEARCH:g} seconds of CPU time"]
                try:
                    outputs = run(model, batch)
                except Exception as error:
                    reasons.append(
                        f"{cls.__name__} ({recipe}) is not called with {', '.join(batch)}: {told(error)}"
                    )
                    continue
                if outputs and all(t.isfinite().any() and t.numel() for t in outputs.values()):
                    return model, batch, recipe
                reasons.append(f"{cls.__name__} ({recipe}) gives no numbers")
    return reasons


def _valid(
    configs: Iterator[tuple[str, PretrainedConfig]], reasons: list[str]
) -> Iterator[tuple[str, PretrainedConfig]]:
    try:
        yield from configs
    except Exception as error:
        reasons.append(f"config: {told(error)}")


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def run(model: nn.Module, batch: dict[str, Any]) -> Outputs:
    """All floating-point tensors of the output, by their paths."""
    torch.manual_seed(0)
    copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in batch.items()}
    with torch.no_grad():
        output = model(**copies)
    outputs: Outputs = {}
    _gather(output, "", outputs)
    return {name: tensor.clone() for name, tensor in outputs.items()}


def _gather(value: Any, path: str, into: Outputs) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            into[path] = value.detach()
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("cache", "past_key_values", "mems", "cache_params", "state", "attentions"):
                _gather(inner, f"{path}.{name}", into)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _gather(inner, f"{path}.{number}", into)


def calls_of(
    model: nn.Module, batch: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], Tensor | None, Outputs]]:
    """{name: (batch, tokens or None, what eager gives)}; padded ones only where eager takes them."""
    calls = {"plain": (batch, None, run(model, batch))}
    for side, (padded_batch, tokens) in padded(batch, model).items():
        try:
            outputs = run(model, padded_batch)
        except Exception:
            continue
        if all(tokens_of(t, tokens).isfinite().all() for t in outputs.values()):
            calls[side] = (padded_batch, tokens, outputs)
    return calls


def tokens_of(tensor: Tensor, tokens: Tensor | None) -> Tensor:
    """Without what stands at the padding."""
    if tokens is None or tensor.dim() < 2 or tensor.shape[:2] != tokens.shape:
        return tensor
    return tensor[tokens]
