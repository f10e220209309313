"""Weights that a model rescales itself in its first call of inference (RWKV): before they are packed, and read-only."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cpu_accel.patching.restore import Journal

_RESCALE, _IS_RESCALED = "_rescale_layers", "layers_are_rescaled"


def rescale_now(root: nn.Module, journal: Journal) -> None:
    """Have the models in `root` do now what their next call would; undone with `journal`, which powers of two allow bit for bit."""
    for module in root.modules():
        if (
            callable(getattr(module, _RESCALE, None))
            and getattr(module, _IS_RESCALED, None) is module.training
        ):
            rescaling = _Rescaling(module)
            journal.record(rescaling)
            rescaling.do()


class _Rescaling:
    def __init__(self, module: Any) -> None:
        self._module = module

    def do(self) -> None:
        self._module._rescale_layers()

    def undo(self) -> None:
        """As the next call in the other mode would."""
        training = self._module.training
        self._module.training = not training
        try:
            self._module._rescale_layers()
        finally:
            self._module.training = training
