"""From models to accelerated ones and back, and what has to happen in between: methods that are called on the originals.

LoRA adapters are put into plain linears and convolutions, and fusing one writes to their weights. Packed weights would be missed by
the former and out of date after the latter, so around such a call the model is restored and accelerated anew. Pipelines of
diffusers change the layers of their models directly, too: `lora.py` has their methods do the same. A pipeline that was made of
models which another one has accelerated has no such methods; for it, text encoders keep plain what adapters are made of and lie
around (`hosts/peft.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_cpu_accel import plan as plans
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.find import Root, find
from hf_cpu_accel.measure.dtype_choice import Choice
from hf_cpu_accel.patching.acceleration import accelerated_parts, acceleration_of, undo
from hf_cpu_accel.patching.interruption import Uninterrupted
from hf_cpu_accel.patching.originals import OriginalsStore
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import Journal, ThreadCount, add_attribute
from hf_cpu_accel.rewrite.apply import apply
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.packed_source import PackedSource
from hf_cpu_accel.runtime.fork import new_reentrant_lock
from hf_cpu_accel.runtime.threads import apply_threads

lock = new_reentrant_lock()  # one model is accelerated or restored at a time

_OF_DIFFUSERS = "load_lora_adapter"
_OF_TRANSFORMERS = "load_adapter"
_METHODS = (
    _OF_DIFFUSERS,
    _OF_TRANSFORMERS,
    "add_adapter",
    "set_adapter",
    "set_adapters",
    "enable_adapters",
    "disable_adapters",
    "delete_adapter",
    "delete_adapters",
    "enable_lora",
    "disable_lora",
    "fuse_lora",
    "unfuse_lora",
    "unload_lora",
)


def accelerate_roots(
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    *,
    saved: tuple[PackedSource, OriginalsStore] | None = None,
    choices: Sequence[Choice | None] | None = None,
    calibration: Sequence[Example] = (),
) -> None:
    """`accelerate_for_cpu` for models that were found and checked; those with other settings are restored first.

    Args:
        saved: where the packed weights of the one model come from, as for `rewrite.apply`.
        choices: for each model what was chosen for `settings.accuracy`.
        calibration: what four-bit weights of the one model are rounded for.
    """
    with lock:
        restore_roots(roots)
        before = torch.get_num_threads()
        begun: list[nn.Module] = []
        try:
            threads = apply_threads(settings.threads)
            changed = ThreadCount(before, torch.get_num_threads())
            for root, choice in zip(roots, choices or [None] * len(roots), strict=True):
                plan = plans.make(
                    settings, root.module, threads=threads.count, thread_reason=threads.reason, choice=choice
                )
                begun.append(root.module)
                acceleration = apply(
                    root.module,
                    plan,
                    trains=root.trains,
                    name=root.name,
                    saved=saved,
                    calibration=calibration,
                )
                acceleration.journal.changes.insert(0, changed)
                if root.trains:
                    continue
                _follow_adapters(root.module, acceleration.journal)
                if settings.compile in ("now", "background"):
                    from hf_cpu_accel.compiler.background.attach import attach

                    attach(root.module, acceleration)
        except BaseException:
            with Uninterrupted():
                ThreadCount(before, torch.get_num_threads()).undo()
                for module in reversed(begun):
                    undo(module)
            raise


def restore_roots(roots: Sequence[Root]) -> None:
    """Undo what is accelerated of them.

    Raises:
        RuntimeError: the original weights of one are gone (`originals="drop"`); it stays accelerated.
    """
    with lock:
        for root in roots:
            for part in accelerated_parts(root.module):
                undo(part)


@contextmanager
def on_originals(models: Sequence[nn.Module]) -> Iterator[None]:
    """`with on_originals(models):` has what is accelerated of them restored on entry, and accelerated anew on exit.

    Raises:
        RuntimeError: the original weights of one are gone (`originals="drop"`); all stay accelerated.
    """
    parts = dict.fromkeys(part for model in models for part in accelerated_parts(model))
    before = [(part, acceleration) for part in parts if (acceleration := acceleration_of(part)) is not None]
    for _, acceleration in before:
        acceleration.journal.check()
    try:
        for part, _ in before:
            undo(part)
        yield
    finally:
        for part, acceleration in before:
            roots = [replace(root, name=acceleration.name) for root in find(part)]
            choices, calibration = acceleration.plan.choices or None, acceleration.calibration
            accelerate_roots(roots, acceleration.config, choices=choices, calibration=calibration)


class OnTheOriginal(Override):
    """A method that is called on models as they were before they were accelerated.

    Raises:
        RuntimeError: the original weights are gone (`originals="drop"`); the models stay as they are.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.name = name
        super().__init__(owner)

    def models(self) -> Sequence[nn.Module]:
        """Those that the method may change; the accelerated ones among them are restored meanwhile."""
        return (self.model,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = self.__wrapped__
        with on_originals(self.models()):
            return method(*args, **kwargs)


def _follow_adapters(root: nn.Module, journal: Journal) -> None:
    """Have the methods of the root that change adapters called on the original, if it has them."""
    cls = type(root)
    takes_adapters = hasattr(cls, _OF_DIFFUSERS) or hasattr(cls, _OF_TRANSFORMERS)
    for name in _METHODS if takes_adapters else ():
        if hasattr(cls, name):
            add_attribute(journal, root, name, OnTheOriginal(root, name))
