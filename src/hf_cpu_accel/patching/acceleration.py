"""The state of an accelerated model: its plan, and the journal that undoes all changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.patching.hooks import forget_children
from hf_cpu_accel.patching.restore import Journal
from hf_cpu_accel.plan import Plan

# A plain attribute of the model, so that its deep copies and pickles have it too.
ATTRIBUTE = "_hf_cpu_accel"


@dataclass(frozen=True)
class Acceleration:
    """The state of an accelerated model.

    Attributes:
        name: its name in the target, if the target has several models.
        calibration: the calls for which four-bit weights were rounded, for another acceleration.
        from_file: whether its packed weights came from a file, without the original ones.
        is_whole: False during the acceleration, and if an interruption could not be undone: `undo` then continues.
    """

    plan: Plan
    journal: Journal
    name: str = ""
    is_whole: bool = True
    from_file: bool = False
    calibration: tuple[Any, ...] = ()

    @property
    def config(self) -> CPUAccelConfig:
        assert self.plan.config is not None
        return self.plan.config


class AddedState:
    """A change in the journal: the attribute, and the hooks that reject loading a state dict."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.hooks: list[Any] = []

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        vars(self.root).pop(ATTRIBUTE, None)


def acceleration_of(root: nn.Module) -> Acceleration | None:
    """Return the state of `root`, or None if it is not accelerated itself (a part of it, or a model around it, may be)."""
    return vars(root).get(ATTRIBUTE)


def has_settings(root: nn.Module, settings: CPUAccelConfig, calibration: Sequence[Any]) -> bool:
    """Return whether `root` is accelerated with these settings and calls to calibrate on."""
    acceleration = acceleration_of(root)
    if acceleration is None or not acceleration.is_whole:
        return False
    if calibration and calibration != acceleration.calibration:
        return False
    if acceleration.config == settings:
        return True
    # For a packed file, originals and threads do not matter: it has no originals.
    dtype = "auto" if settings.dtype == acceleration.plan.dtype else settings.dtype
    packed = replace(settings, dtype=dtype, threads=None, originals="disk")
    return acceleration.from_file and packed == CPUAccelConfig()


def accelerated_parts(root: nn.Module) -> list[nn.Module]:
    """Return the modules at and below `root` that were accelerated on their own."""
    return [module for module in root.modules() if acceleration_of(module) is not None]


def undo(root: nn.Module) -> None:
    """Restore the original modules, weights and configs of `root`.

    Raises:
        RuntimeError: the original weights were dropped (`originals="drop"`); the model stays accelerated.
    """
    acceleration = acceleration_of(root)
    if acceleration is not None:
        acceleration.journal.check()
        acceleration.journal.undo()
        forget_children(root)  # hooks on fused modules moved to the originals
