"""Eval mode: modules that are not in it in a model that is, and `model.eval()` where all are.

diffusers leaves what it puts into a model in training mode: LoRA adapters, an IP-Adapter's processors. Most of them compute the
same in both. sentence-transformers calls `eval` for each request, and to set the mode of 120 modules that have it takes a tenth of
the time of MiniLM on one short sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.hosts.models import pretrained_models
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import Journal, add_attribute


def asks_for_mode(module: nn.Module) -> bool:
    """Whether the forward of `module` looks at its mode, and has a probability to drop something with, if it is a dropout."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
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


class Train(Override):
    """`train` of an accelerated model, which `eval` calls."""

    name = "train"

    def __call__(self, mode: bool = True) -> Any:
        return self.model if mode is False and _is_in_eval_mode(self.model) else self.__wrapped__(mode)


def keep_eval_mode(journal: Journal, root: nn.Module) -> None:
    """Have `root` look whether there is anything to do when it is put into eval mode."""
    if Train.name not in vars(root):
        add_attribute(journal, root, Train.name, Train(root))


def _is_in_eval_mode(root: nn.Module) -> bool:
    """Whether `root.train(False)` would change nothing: all modules are in eval mode, and none has a `train` that does more."""
    plain = _plain_methods()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        known = vars(module)
        if known["training"] or type(module).train not in plain:
            return False
        if module is not root and type(known.get(Train.name)) not in (type(None), Train):
            return False
        waiting.extend(child for child in known["_modules"].values() if child is not None)
    return True


def _plain_methods() -> tuple[Callable[..., Any], ...]:
    """Those that only set the mode of a module and of those inside, if it was another."""
    return (nn.Module.train, *(model.train for model in pretrained_models()))
