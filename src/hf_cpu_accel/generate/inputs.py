"""Inputs of the model: for the prompt, and for each following token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from hf_cpu_accel.hosts.arguments import cache_argument

CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation) or "past_key_values"
"""How this version of transformers names the cache in what models are called with and give back."""
_ROOM = 256  # tokens by which the attention mask grows


def prefill(
    model: Any,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    mask_length: int | None,
) -> tuple[Any, dict[str, Any]]:
    """Run the prompt through the model: all of it, or the tokens that the cache does not hold yet.

    It runs `generation_config.prefill_chunk_size` tokens at a time, if set, which takes less memory for long prompts.

    Args:
        mask_length: columns of the attention mask, which show whether `input_ids` begin where the cache does.

    Returns:
        The model's output for the last tokens, and the inputs that it was called with.
    """
    cache = model_kwargs.get(CACHE)
    past = 0 if cache is None or _counts_nothing(cache) else cache.get_seq_length()
    embeds = model_kwargs.get("inputs_embeds")
    new_tokens = None
    if past and embeds is not None and not model.config.is_encoder_decoder:
        new_tokens = embeds.shape[1] - past
    elif past and mask_length == input_ids.shape[1]:
        new_tokens = input_ids.shape[1] - past
    chunk = generation_config.prefill_chunk_size
    if chunk is None:
        inputs = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new_tokens, is_first_iteration=True, **model_kwargs
        )
        return model(**inputs, return_dict=True), inputs
    by_position = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
    for ids in input_ids[:, -(new_tokens or 0) :].split(chunk, dim=1):
        seen = past + ids.shape[1]
        sliced = dict(model_kwargs)
        if by_position["attention_mask"] is not None:
            sliced["attention_mask"] = by_position["attention_mask"][:, :seen]
        if by_position["position_ids"] is not None:
            sliced["position_ids"] = by_position["position_ids"][..., past:seen]
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **sliced)
        outputs = model(**inputs, return_dict=True)
        model_kwargs[CACHE] = cache = _handed_back(outputs, inputs.get(CACHE))
        past = seen
    return outputs, inputs


def _counts_nothing(cache: Any) -> bool:
    """Return whether the cache holds only recurrent states, which do not count tokens."""
    return all(getattr(cache, "is_linear", (False,)))


class StepInputs:
    """The inputs of the model for new tokens of each sequence, step by step.

    A model that prepares its inputs in the usual way gets the same dictionary each time, with new tokens, positions and a mask. A
    model that overrides this is asked each time.

    Args:
        length: tokens of each sequence when the model was called with `first`.

    Attributes:
        cache: the cache that the model continues with.
    """

    def __init__(
        self, model: Any, first: dict[str, Any], model_kwargs: dict[str, Any], outputs: Any, length: int
    ) -> None:
        self.cache = _handed_back(outputs, first.get(CACHE, model_kwargs.get(CACHE)))
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self._ids, self._mask = f"{prefix}input_ids", f"{prefix}attention_mask"
        self._position = f"{prefix}position_ids"
        self._own_way = None if prepares_as_usual(model) else model.prepare_inputs_for_generation
        self._inputs = {**(first if self._own_way is None else model_kwargs), CACHE: self.cache}
        if self._own_way is None:
            self._inputs.pop("inputs_embeds", None)
        mask, positions = model_kwargs.get(self._mask), model_kwargs.get(self._position)
        self._masks = None if mask is None else _GrowingMask(mask, mask.shape[1] - length)
        if positions is not None and self._own_way is None:
            positions = positions[..., -1:]
        self._first_positions: Tensor | None = positions
        self._length = length

    def after(self, ids: Tensor, new_tokens: int = 1) -> dict[str, Any]:
        """Return the inputs for the last columns of `ids`, int64 [batch, tokens], with logits for all of them."""
        inputs, length = self._inputs, ids.shape[1]
        if self._masks is not None:
            inputs[self._mask] = self._masks.over(length)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = new_tokens
        positions = self._first_positions
        if self._own_way is None:
            inputs[self._ids] = ids[:, -new_tokens:]
            if positions is not None:
                inputs[self._position] = positions + self._since(length - new_tokens, length)
            return inputs
        if positions is not None:
            later = positions[..., -1:] + self._since(self._length, length)
            inputs[self._position] = torch.cat([positions, later], dim=-1)
        prepared: dict[str, Any] = self._own_way(ids, next_sequence_length=new_tokens, **inputs)
        return prepared

    def go_on_with(self, outputs: Any) -> None:
        """Continue with the cache that the model returned: a model that overrides its inputs may have created another one."""
        if self._own_way is not None:
            self.cache = self._inputs[CACHE] = _handed_back(outputs, self.cache)

    def _since(self, begin: int, end: int) -> Tensor:
        """Return how far the positions `begin` to `end` are from the last one of the prompt."""
        return torch.arange(begin - self._length + 1, end - self._length + 1)


class _GrowingMask:
    """An attention mask [batch, tokens] that gets columns of ones.

    Args:
        more: how many columns it has more than the text has tokens: for embeddings.
    """

    def __init__(self, mask: Tensor, more: int) -> None:
        self._buffer, self._more = mask, more

    def over(self, length: int) -> Tensor:
        """Return the mask over a text of `length` tokens."""
        columns = length + self._more
        missing = columns - self._buffer.shape[1]
        if missing > 0:
            ones = self._buffer.new_ones(len(self._buffer), missing + _ROOM)
            self._buffer = torch.cat([self._buffer, ones], dim=1)
        return self._buffer[:, :columns]


def _handed_back(outputs: Any, cache: Any) -> Any:
    """Return the cache in the outputs of a model that was called with `cache`, or `cache` if it returns none."""
    handed_back = getattr(outputs, CACHE, None)
    return cache if handed_back is None else handed_back


def prepares_as_usual(model: Any) -> bool:
    """Return whether the class of `model` inherits how inputs are prepared."""
    inherited: bool = (
        type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and not model.is_remote_code()
    )
    return inherited
