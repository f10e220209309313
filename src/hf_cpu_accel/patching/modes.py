"""Modules in training mode in a model that is in eval mode.

diffusers leaves what it puts into a model so: LoRA adapters, an IP-Adapter's processors. Most of them compute the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_cpu_accel.patching.restore import Journal


def asks_for_mode(module: nn.Module) -> bool:
    """Whether the forward of `module` looks at its mode, and has a probability to drop something with, if it is a dropout."""
    code = getattr(type(module).forward, "__code__", None)
    return (code is None or "training" in code.co_names) and getattr(module, "p", None) != 0


@dataclass(frozen=True)
class EvalMode:
    """These modules were in training mode."""

    modules: list[nn.Module]

    def undo(self) -> None:
        for module in self.modules:
            module.training = True


def set_eval_mode(journal: Journal, root: nn.Module) -> None:
    """Modules that compute the same in eval mode are put into it, which layers of ours ask for."""
    modules = [module for module in root.modules() if module.training and not asks_for_mode(module)]
    if modules:
        journal.record(EvalMode(modules))
        for module in modules:
            module.training = False
