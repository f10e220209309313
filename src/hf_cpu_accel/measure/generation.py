"""Timing of `model.generate`, token by token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenClock:
    """A streamer, `model.generate(streamer=TokenClock())`, that records the time of each token.

    Attributes:
        times: one `time.perf_counter()` per token (per row of tokens of a batch). The prompt, which `generate` passes first, is
            ignored.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


@dataclass(frozen=True)
class Generated:
    """One call of `generate`: the seconds to its first token, and of each token after it."""

    first: float
    steps: tuple[float, ...]

    @property
    def step(self) -> float:
        """The mean seconds per token after the first."""
        return sum(self.steps) / len(self.steps)


def plain_greedy(model: PreTrainedModel) -> None:
    """Replace the model's generation settings by greedy search without an end token.

    Published models have settings for sampling, beams, forced or forbidden tokens, which `generate` uses by default. Without an end
    token nothing stops early, and no logits processor has to suppress it.
    """
    from transformers import GenerationConfig

    start = None
    if model.config.is_encoder_decoder:
        own = model.generation_config
        start = own.bos_token_id if own.decoder_start_token_id is None else own.decoder_start_token_id
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, decoder_start_token_id=start)


def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor], new: int) -> Generated:
    """Time one call that generates `new` tokens, with the model's generation settings (see `plain_greedy`).

    Args:
        model: with `generate`.
        inputs: input_ids and attention_mask, int64 [batch, prompt].
        new: the number of tokens to generate, at least 2.

    Raises:
        ValueError: `new` is below 2.
        RuntimeError: another number of tokens was generated.
    """
    if new < 2:
        raise ValueError(f"new={new}: expected at least 2, since times between tokens are measured")
    clock = TokenClock()
    generate_tokens: Any = model.generate
    with torch.inference_mode():
        start = time.perf_counter()
        generate_tokens(**inputs, max_new_tokens=new, streamer=clock)
    if len(clock.times) != new:
        raise RuntimeError(f"{len(clock.times)} tokens were generated, expected {new}")
    return Generated(clock.times[0] - start, tuple(b - a for a, b in pairwise(clock.times)))
