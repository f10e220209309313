"""Sampling settings: the generation config of the model, overridden by the request."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of a request; None uses the setting of the model. A temperature of 0 is greedy decoding."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None

    def config(self, model: GenerationConfig) -> GenerationConfig:
        """Return the generation config of the model with these settings."""
        config = copy.copy(model)
        if self.temperature is not None:
            config.do_sample = self.temperature > 0
            config.temperature = self.temperature
        elif self.top_p is not None or self.top_k is not None:
            config.do_sample = True
        config.top_p = config.top_p if self.top_p is None else self.top_p
        config.top_k = config.top_k if self.top_k is None else self.top_k
        return config


def processors(config: GenerationConfig, mask: Any = None) -> LogitsProcessorList | None:
    """Return the logits processors of `generate` for a config, in its order, after `mask`; None if there are none."""
    result = LogitsProcessorList([] if mask is None else [mask])
    if config.repetition_penalty not in (None, 1.0):
        result.append(RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if config.do_sample:
        if config.temperature not in (None, 1.0):
            result.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k not in (None, 0):
            result.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1.0:
            result.append(TopPLogitsWarper(config.top_p))
    return result or None
