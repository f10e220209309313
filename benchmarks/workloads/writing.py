"""Models that generate text: encoder-decoders, called as their pipelines call them, and decoders with greedy search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.bench import workload as bench_workload
from hf_cpu_accel.cli.decoder_shapes import DECODERS
from hf_cpu_accel.measure.generation import plain_greedy

_BEAMS = {"num_beams": 4, "early_stopping": True}
# How the published configurations of these models have them write; other encoder-decoders get four beams.
_SETTINGS: dict[str, dict[str, Any]] = {
    "t5-small": _BEAMS,  # translation
    "bart-base": {
        **_BEAMS,
        "no_repeat_ngram_size": 3,
        "length_penalty": 2.0,
        "forced_bos_token_id": 0,
    },  # summaries
}


@dataclass(frozen=True)
class Writing:
    """A model of a well-known shape that reads `batch` texts of `tokens` tokens and writes `new` tokens for each, end to end."""

    name: str
    batch: int
    tokens: int
    new: int

    def build(self) -> nn.Module:
        """The float32 eager model; the same weights in every process."""
        if self.name not in DECODERS:
            return random_models.build(self.name, "AutoModelForSeq2SeqLM")
        model = random_models.build(self.name, "AutoModelForCausalLM")
        plain_greedy(model)
        return model

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Random token ids and their mask, both int64 [batch, tokens]."""
        reading = bench_workload.workload(None, self.name, "feature-extraction", self.batch, self.tokens)
        return reading.inputs(model, seed)

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """[the ids of the tokens, float32 [batch, new]]: two systems agree fully where they write the same."""
        generate: Any = model.generate
        settings = {} if self.name in DECODERS else _SETTINGS.get(self.name, _BEAMS)
        with torch.inference_mode():
            tokens: Tensor = generate(
                **inputs, **settings, do_sample=False, min_new_tokens=self.new, max_new_tokens=self.new
            )
        return [tokens[:, -self.new :].float()]

    def real_tokens(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """All of them are."""
        return list(outputs)


def writing(name: str, batch: int, tokens: int, new: int) -> Writing:
    """Return the workload of a model that reads `tokens` tokens and writes `new`.

    Raises:
        ValueError: The shape is unknown, or the model does not generate text, or a number is below one.
    """
    if name not in DECODERS and not random_models.config(name).is_encoder_decoder:
        raise ValueError(
            f"{name} only reads; MODEL:BATCHxTOKENS+NEW is for models that generate text, e.g. t5-small:1x32+64 or gpt2:1x32+32"
        )
    if min(batch, tokens, new) < 1:
        raise ValueError(
            f"{name}:{batch}x{tokens}+{new}: needs at least one row, one token, and one to write"
        )
    return Writing(name, batch, tokens, new)
