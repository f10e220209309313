"""Rescale weights that a model rescales in its first inference call (RWKV), before they are packed and read-only."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cpu_accel.patching.restore import Journal

_RESCALE, _IS_RESCALED = "_rescale_layers", "layers_are_rescaled"


def rescale_now(root: nn.Module, journal: Journal) -> None:
    """Rescale the weights of the models in `root` now; `journal` undoes it, exactly since the factors are powers of two."""
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
        """Rescale as the next call in the other mode would."""
        training = self._module.training
        self._module.training = not training
        try:
            self._module._rescale_layers()
        finally:
            self._module.training = training
