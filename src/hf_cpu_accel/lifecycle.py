"""From models to accelerated ones and back, and what has to happen in between: methods that are called on the originals.

LoRA adapters are put into plain linears and convolutions, fusing one writes to their weights, and a vocabulary is resized in plain
embeddings. Packed weights would be missed by the first and out of date after the others, so around such a call the model is
restored and accelerated anew. A model inside of the accelerated one refuses such calls before anything has changed.

Pipelines of diffusers change the layers of their models directly, too: `lora.py` has their methods do the same. A pipeline that was
made of models which another one has accelerated has no such methods; for it, text encoders keep plain what adapters are made of and
lie around (`hosts/peft.py`).
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
from hf_cpu_accel.rewrite.apply import apply_stages
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.packed_source import PackedSource
from hf_cpu_accel.runtime.fork import new_reentrant_lock
from hf_cpu_accel.runtime.threads import apply_threads

lock = new_reentrant_lock()  # one model is accelerated or restored at a time

_OF_DIFFUSERS = "load_lora_adapter"
_OF_TRANSFORMERS = "load_adapter"
_OF_ADAPTERS = (
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
_RESIZES = "resize_token_embeddings"
# Methods of transformers' models that write to weights, put others in their place, or set what training reads in layers.
_OF_WEIGHTS = (
    _RESIZES,
    "resize_position_embeddings",
    "tie_weights",
    "set_input_embeddings",
    "set_output_embeddings",
    "set_encoder",
    "set_decoder",
    "init_weights",
    "initialize_weights",
    "post_init",
    "prune_heads",
    "dequantize",
    "gradient_checkpointing_enable",
    "gradient_checkpointing_disable",
    "activation_checkpointing_enable",
    "activation_checkpointing_disable",
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
        saved: where the packed weights of the one model come from, as for `apply_stages`.
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
                acceleration = apply_stages(
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
                _follow_writers(root.module, acceleration.journal)
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
            result = method(*args, **kwargs)
            path = self._path_of(result)
        return result if path is None else self.model.get_submodule(path)

    def _path_of(self, result: Any) -> str | None:
        """The path of a module that the method returns, such as resized embeddings: another one may be there from now on."""
        if not isinstance(result, nn.Module) or not isinstance(self.model, nn.Module):
            return None
        return next((path for path, module in self.model.named_modules() if module is result), None)


class RefusedInside(Override):
    """A method of a model inside of an accelerated one, which does not know the latter.

    Raises:
        RuntimeError: always, with the model untouched.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name = name
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name} of this {type(self.model).__name__} would change weights that are packed in an accelerated model: call "
            f"{self.name} of the accelerated model, or call hf_cpu_accel.restore, change it, and accelerate again"
        )


def _follow_writers(root: nn.Module, journal: Journal) -> None:
    """Have the methods of the root that write to weights called on the original; models inside of it refuse them."""
    for module in list(root.modules()):
        kind = OnTheOriginal if module is root else RefusedInside
        for name in _writers(type(module)):
            add_attribute(journal, module, name, kind(module, name))


def _writers(cls: type[nn.Module]) -> Iterator[str]:
    """The names of the methods of a host's model that write to its weights."""
    takes_adapters = hasattr(cls, _OF_DIFFUSERS) or hasattr(cls, _OF_TRANSFORMERS)
    names = (*_OF_ADAPTERS, *_OF_WEIGHTS) if hasattr(cls, _RESIZES) else _OF_ADAPTERS
    return (name for name in names if takes_adapters and hasattr(cls, name))
