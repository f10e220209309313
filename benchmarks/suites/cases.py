"""The models of the suites by name, `SUITE.MODEL:BATCH`, e.g. `timm.mixer_b16:1`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suites import huggingface, timm, torchbench
from benchmarks.suites.model import Model
from hf_cpu_accel.cli import random_models

SUITES: dict[str, dict[str, Model]] = {
    "huggingface": huggingface.MODELS,
    "timm": timm.MODELS,
    "torchbench": torchbench.MODELS,
}


@dataclass(frozen=True)
class Case:
    """A model of a suite on a batch; its first output is the answer."""

    suite: str
    name: str
    batch: int

    @property
    def model(self) -> Model:
        return SUITES[self.suite][self.name]

    def build(self) -> nn.Module:
        """Build the float32 eager model; the same weights in every process."""
        return random_models.seeded(self.model.build)

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Return random inputs; the same for the same seed."""
        return self.model.inputs(self.batch, torch.Generator().manual_seed(seed))

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Return the first output, without gradients."""
        with torch.inference_mode():
            output: Any = model(**inputs) if self.model.by_name else model(*inputs.values())
        return [output if isinstance(output, Tensor) else output[0]]

    def real_tokens(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return each output as one row per input: a cosine of a few numbers is unreliable."""
        return [output.flatten(1) for output in outputs]


def case(name: str) -> Case | None:
    """Return the case of `SUITE.MODEL:BATCH`; None for other text."""
    match = re.fullmatch(r"(\w+)\.([\w.-]+):([1-9]\d*)", name)
    if match is None or match[2] not in SUITES.get(match[1], {}):
        return None
    return Case(match[1], match[2], int(match[3]))
