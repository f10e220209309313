"""A model to accelerate, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Root:
    """A model to accelerate.

    Attributes:
        module: the model.
        host: the library that it comes from, `"transformers"`, `"diffusers"`, `"sentence_transformers"`, `"pyg"` or `"torch"`.
        deciding: the modules whose `training` flags tell whether the model is in training mode.
        name: what the target calls it, if it has several models (`"unet"`); the paths of its modules begin with that.
        adds_in_training: whether the host leaves what it puts into a model (adapters, processors) in training mode.
    """

    module: nn.Module
    host: str
    deciding: tuple[nn.Module, ...]
    name: str = ""
    adds_in_training: bool = False

    @property
    def trains(self) -> bool:
        """Whether the model is to be trained while it is accelerated: then nothing is packed or frozen."""
        return not self.deciding and self.module.training
