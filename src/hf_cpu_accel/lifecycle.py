"""Accelerate and restore models, and run methods that change weights on the original models.

LoRA adapters replace plain linears and convolutions, fusing an adapter writes to their weights, and resizing a vocabulary changes
plain embeddings. Packed layers would be missed or out of date. So the model is restored before such a call and accelerated again
after it. A model inside of an accelerated one rejects such calls before anything changes.

Diffusers pipelines change the layers of their models directly; `lora.py` does the same for their methods. A pipeline that shares
models with another, accelerated pipeline has no such methods. For it, text encoders keep the plain modules that adapters need
(`hosts/peft.py`).
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

lock = new_reentrant_lock()  # models are accelerated and restored one at a time

_DIFFUSERS_METHOD = "load_lora_adapter"
_TRANSFORMERS_METHOD = "load_adapter"
_ADAPTER_METHODS = (
    _DIFFUSERS_METHOD,
    _TRANSFORMERS_METHOD,
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
_RESIZE_METHOD = "resize_token_embeddings"
# Methods of transformers models that write or replace weights, or change settings of layers for training.
_WEIGHT_METHODS = (
    _RESIZE_METHOD,
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
    """Accelerate models that were found and checked; models with other settings are restored first.

    Args:
        roots: the models.
        settings: the settings.
        saved: the packed weights of a single model from a file, as for `apply_stages`.
        choices: the choices of dtypes for `settings.accuracy`, one per model.
        calibration: the calls to calibrate a single model on.
    """
    with lock:
        restore_roots(roots)
        before = torch.get_num_threads()
        started: list[nn.Module] = []
        try:
            threads = apply_threads(settings.threads)
            changed = ThreadCount(before, torch.get_num_threads())
            for root, choice in zip(roots, choices or [None] * len(roots), strict=True):
                plan = plans.make(
                    settings, root.module, threads=threads.count, thread_reason=threads.reason, choice=choice
                )
                started.append(root.module)
                acceleration = apply_stages(root, plan, saved=saved, calibration=calibration)
                acceleration.journal.changes.insert(0, changed)
                if not root.trains:
                    _follow_writers(root.module, acceleration.journal)
        except BaseException:
            with Uninterrupted():
                ThreadCount(before, torch.get_num_threads()).undo()
                for module in reversed(started):
                    undo(module)
            raise


def restore_roots(roots: Sequence[Root]) -> None:
    """Restore the accelerated models among `roots`, and accelerated models inside of them.

    Raises:
        RuntimeError: the original weights of a model were dropped (`originals="drop"`); it stays accelerated.
    """
    with lock:
        for root in roots:
            for part in accelerated_parts(root.module):
                undo(part)


@contextmanager
def on_originals(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore models inside a context, and accelerate them again at its end.

    Raises:
        RuntimeError: the original weights of a model were dropped (`originals="drop"`); all models stay accelerated.
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
    """A method that runs on the original models.

    Raises:
        RuntimeError: the original weights were dropped (`originals="drop"`); the models stay unchanged.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.name = name
        super().__init__(owner)

    def models(self) -> Sequence[nn.Module]:
        """Return the models that the method may change; accelerated ones are restored during the call."""
        return (self.model,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = self.__wrapped__
        with on_originals(self.models()):
            result = method(*args, **kwargs)
            path = self._path_of(result)
        return result if path is None else self.model.get_submodule(path)

    def _path_of(self, result: Any) -> str | None:
        """Return the path of a module that the method returns, such as resized embeddings, which acceleration may replace."""
        if not isinstance(result, nn.Module) or not isinstance(self.model, nn.Module):
            return None
        return next((path for path, module in self.model.named_modules() if module is result), None)


class RefusedInside(Override):
    """A method of a model inside of an accelerated one, which cannot restore the outer model.

    Raises:
        RuntimeError: always, before anything changes.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.name = name
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name} of this {type(self.model).__name__} would change weights that are packed in an accelerated model: call "
            f"{self.name} of the accelerated model, or restore it, call {self.name}, and accelerate it again"
        )


def _follow_writers(root: nn.Module, journal: Journal) -> None:
    """Make the methods that write weights run on the original root; models inside of it reject them."""
    for module in list(root.modules()):
        kind = OnTheOriginal if module is root else RefusedInside
        for name in _writers(type(module)):
            add_attribute(journal, module, name, kind(module, name))


def _writers(cls: type[nn.Module]) -> Iterator[str]:
    """Return the names of the methods of a model class that write weights."""
    has_adapters = hasattr(cls, _DIFFUSERS_METHOD) or hasattr(cls, _TRANSFORMERS_METHOD)
    names = (*_ADAPTER_METHODS, *_WEIGHT_METHODS) if hasattr(cls, _RESIZE_METHOD) else _ADAPTER_METHODS
    return (name for name in names if has_adapters and hasattr(cls, name))
