"""Which models an engine takes, and how long their sequences may be."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from hf_cpu_accel.generate.cache import cache_refusal
from hf_cpu_accel.generate.coverage import loop_refusal
from hf_cpu_accel.rewrite.core.verify import row_error
from hf_cpu_accel.serve.engine.batch import Batch
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.tolerance import BATCHED

_ACCEPTED = (
    "accepted are decoders of transformers that generate (AutoModelForCausalLM) and keep keys and values only"
)


def check_model(model: Any) -> None:
    """
    Raises:
        ValueError: the model is none that generates text from text with keys and values alone.
    """
    reason = _refusal(model)
    if reason is not None:
        raise ValueError(f"model={type(model).__name__}: {reason}; {_ACCEPTED}")


def _refusal(model: Any) -> str | None:
    if not isinstance(model, GenerationMixin) or not model.can_generate():  # type: ignore[attr-defined]
        return "it does not generate"
    if model.config.is_encoder_decoder:  # type: ignore[attr-defined]
        return "it has an encoder, whose output would be another for each sequence"
    return loop_refusal(model) or cache_refusal(model.config)  # type: ignore[attr-defined]


def check_batches(forward: Forward) -> None:
    """Let sequences of different lengths go on together, and compare with each of them alone.

    Raises:
        ValueError: the model does not heed masks or positions, so that sequences would change one another's tokens.
    """
    vocabulary = forward.model.get_input_embeddings().num_embeddings
    batch, alone = Batch(forward, 2), []
    texts = [[(7 * i + start) % vocabulary for i in range(length)] for start, length in ((3, 3), (1, 6))]
    for text in texts:
        storage, cache = forward.new_row(len(text))
        forward.extend(cache, text[:-1], 0)
        batch.add(storage.part(0, 0, len(text) - 1))
        alone.append(forward.extend(cache, text[-1:], len(text) - 1))
    error = row_error(batch.step([text[-1] for text in texts]), torch.cat(alone))
    if not error <= BATCHED:
        raise ValueError(
            f"model={type(forward.model).__name__}: sequences of different lengths in one batch get other logits than each "
            f"alone, by {error:.0%}; {_ACCEPTED}, and heed attention_mask"
        )


def longest(model: Any, max_length: int | None) -> int:
    """
    Args:
        max_length: what is asked for, None: as many tokens as the model was made for.

    Raises:
        ValueError: the model cannot be given so many, or says nothing of a limit and none was given.
    """
    limit = _limit(model.config.get_text_config(decoder=True))
    if max_length is None:
        if limit is None:
            raise ValueError(
                f"max_length=None: {type(model).__name__} says nothing about how many tokens it was made for; a number is needed"
            )
        return limit
    if not isinstance(max_length, int) or max_length < 2 or (limit is not None and max_length > limit):
        raise ValueError(
            f"max_length={max_length!r}: accepted are whole numbers from 2"
            + (f" to {limit}" if limit else "")
        )
    return max_length


def _limit(config: Any) -> int | None:
    """How many tokens a sequence may have. Beyond some length, rotary frequencies that depend on the longest sequence of a batch
    would make each sequence depend on its neighbors."""
    limits = [getattr(config, "max_position_embeddings", None)]
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in (rotary, *(value for value in rotary.values() if isinstance(value, dict))):
        if settings.get("rope_type") in ("longrope", "dynamic"):
            limits.append(settings.get("original_max_position_embeddings"))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None
