"""A model to accelerate, and its host library."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Root:
    """A model to accelerate.

    Attributes:
        module: the model.
        host: the library of the model, `"transformers"`, `"diffusers"`, `"sentence_transformers"`, `"pyg"` or `"torch"`.
        deciding: the modules whose `training` flags decide whether the model is in training mode.
        name: its name in a target with several models (`"unet"`), the prefix of the paths of its modules.
        adds_in_training: whether the host adds modules (adapters, processors) in training mode.
    """

    module: nn.Module
    host: str
    deciding: tuple[nn.Module, ...]
    name: str = ""
    adds_in_training: bool = False

    @property
    def trains(self) -> bool:
        """Return whether the accelerated model is in training mode, so that nothing is packed or frozen."""
        return not self.deciding and self.module.training
