"""A saved model in a rival's environment, which has torch and transformers or diffusers but not this package."""

from __future__ import annotations

import importlib
from pathlib import Path

from torch import Tensor, nn

from benchmarks.peers.conversion import inputs


class SavedModel(nn.Module):
    """The model of a case: (its inputs, in their order) -> its first output."""

    def __init__(self, case: Path, **options: object) -> None:
        """`options` go to from_pretrained."""
        super().__init__()
        module, name = (case.parent / "class.txt").read_text().split()
        model_class = getattr(importlib.import_module(module), name)
        self.model = model_class.from_pretrained(case.parent, **options).eval()
        self.names = tuple(inputs(case))

    def forward(self, *tensors: Tensor) -> Tensor:
        output: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)))[0]
        return output
