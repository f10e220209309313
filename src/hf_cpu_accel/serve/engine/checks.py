"""Check that an engine supports a model, and find the maximum length of its sequences."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import cache_refusal
from hf_cpu_accel.generate.coverage import loop_refusal
from hf_cpu_accel.serve.engine.batch import Batch
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.tolerance import BATCHED

_ACCEPTED = "accepted are transformers decoders (AutoModelForCausalLM) whose only state is the KV cache"


def check_model(model: Any) -> None:
    """Check that an engine can generate with a model.

    Raises:
        ValueError: the model does not generate, has an encoder, or has a state other than the KV cache.
    """
    reason = _why_unsupported(model)
    if reason is not None:
        raise ValueError(f"model={type(model).__name__} is not supported: {reason}; {_ACCEPTED}")


def _why_unsupported(model: Any) -> str | None:
    if not isinstance(model, GenerationMixin) or not model.can_generate():  # type: ignore[attr-defined]
        return "it does not generate"
    if model.config.is_encoder_decoder:  # type: ignore[attr-defined]
        return "it has an encoder, whose output differs between sequences"
    return loop_refusal(model) or cache_refusal(model.config)  # type: ignore[attr-defined]


def check_batches(forward: Forward) -> None:
    """Decode sequences of different lengths in a batch, and compare the logits with those of each sequence alone.

    Raises:
        ValueError: the logits differ, because the model ignores masks or positions.
    """
    vocabulary = forward.model.get_input_embeddings().num_embeddings
    batch, alone = Batch(forward, 2), []
    texts = [[(7 * i + start) % vocabulary for i in range(length)] for start, length in ((3, 3), (1, 6))]
    for text in texts:
        storage, cache = forward.new_row(len(text))
        forward.extend(cache, text[:-1], 0)
        batch.add(storage.part(0, 0, len(text) - 1))
        alone.append(forward.extend(cache, text[-1:], len(text) - 1))
    error = row_error(batch.step(texts), torch.cat(alone))
    if not error <= BATCHED:
        raise ValueError(
            f"model={type(forward.model).__name__} is not supported: its logits in a batch differ by {error:.0%} from those of "
            f"each sequence alone; {_ACCEPTED} and that use attention_mask and position_ids"
        )


def longest(model: Any, max_length: int | None) -> int:
    """Return the maximum number of tokens of a sequence.

    Args:
        model: the model.
        max_length: the requested number; None for the limit of the model.

    Raises:
        ValueError: more than the limit of the model, or None for a model whose config names no limit.
    """
    limit = _limit(model.config.get_text_config(decoder=True))
    if max_length is None:
        if limit is None:
            raise ValueError(
                f"max_length=None: the config of {type(model).__name__} has no max_position_embeddings; pass a number"
            )
        return limit
    if not isinstance(max_length, int) or max_length < 2 or (limit is not None and max_length > limit):
        raise ValueError(
            f"max_length={max_length!r}: expected a whole number from 2" + (f" to {limit}" if limit else "")
        )
    return max_length


def _limit(config: Any) -> int | None:
    """Return the maximum tokens of a sequence from the config; None if it names none.

    With longrope and dynamic RoPE, the frequencies of long batches depend on the longest sequence. So the limit is the length up to
    which they are constant.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in (rotary, *(value for value in rotary.values() if isinstance(value, dict))):
        if settings.get("rope_type") in ("longrope", "dynamic"):
            limits.append(settings.get("original_max_position_embeddings"))
    numbers = [limit for limit in limits if limit is not None]
    return min(numbers) if numbers else None
