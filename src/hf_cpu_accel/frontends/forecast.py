"""Estimate the memory that `from_pretrained(..., cpu_optimize=...)` needs before it reads weights.

A model that cannot fit raises `MemoryError`, instead of a process that the system kills.

The estimate is a lower bound, so that no model is rejected that would fit. It counts packed weights, and weights that are not
pages of the checkpoint because they are cast or joined from several tensors. Buffers, caches and the memory of the host library
are not counted.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hf_cpu_accel import plan as plans
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.packing.linear import DTYPES, shapes_of
from hf_cpu_accel.runtime import cgroup
from hf_cpu_accel.runtime.context import within

if TYPE_CHECKING:
    from hf_cpu_accel.frontends.patches import HostPatches

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Stored = Counter[tuple[torch.dtype, tuple[int, ...]]]
"""Number of tensors in the files of a checkpoint per (dtype, shape)."""


@dataclass(frozen=True)
class Forecast:
    """The least memory that loading a model takes, in bytes.

    Attributes:
        packed: size of the packed weights.
        copied: size of the weights that are not pages of the checkpoint.
        unpacked: the part of `copied` that is not packed.
        frees: True if weights are freed when they are packed.
    """

    packed: int
    copied: int
    unpacked: int
    frees: bool

    @property
    def peak(self) -> int:
        """Return the least peak of the memory in bytes."""
        return max(self.copied, self.unpacked + self.packed) if self.frees else self.copied + self.packed


class _Loading:
    """One call with `cpu_optimize`. The models of a pipeline are packed after all are loaded, in `packed_later` bytes."""

    def __init__(self, config: CPUAccelConfig) -> None:
        self.config = config
        self.packed_later = 0


_current: ContextVar[_Loading | None] = ContextVar("a call with cpu_optimize", default=None)


def forecasting(config: CPUAccelConfig) -> AbstractContextManager[None]:
    """Check the memory for models that are loaded inside the context, to be accelerated with `config`.

    Raises:
        MemoryError: a model cannot fit; the message names the needed and the available memory, and dtypes that would fit.
    """
    return within(_current, _Loading(config))


def patch_loader(owner: type, patches: HostPatches) -> None:
    """Make the host's `_load_pretrained_model`, which gets the empty model and the files, check the memory first."""
    original = vars(owner).get("_load_pretrained_model")
    if not isinstance(original, classmethod | staticmethod):
        return  # no check with another version of the host
    function = original.__func__
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        loading = _current.get()
        if loading is not None and patches.active:
            _check(loading, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    patches.replace(owner, "_load_pretrained_model", type(original)(wrapper))


def _check(loading: _Loading, arguments: Mapping[str, Any]) -> None:
    model, state = arguments.get("model"), arguments.get("state_dict")
    files = arguments.get("checkpoint_files", arguments.get("resolved_model_file"))
    quantizer = arguments.get("hf_quantizer") or getattr(arguments.get("load_config"), "hf_quantizer", None)
    if not isinstance(model, nn.Module) or not (state or files) or quantizer is not None:
        return
    dtype = plans.make(loading.config, model, threads=1, thread_reason="").dtype
    stored = _tensors_of(state) if state else stored_tensors(files)
    needed = forecast(model, stored, loading.config, dtype)
    available = available_memory()
    if loading.packed_later + needed.peak > available:
        raise MemoryError(_memory_message(loading, model, stored, dtype, available))
    loading.packed_later += needed.packed


def forecast(model: nn.Module, stored: Stored | None, config: CPUAccelConfig, dtype: str) -> Forecast:
    """Return the least memory that loading a model takes.

    Args:
        model: the model, with parameters on the meta device.
        stored: the tensors of its checkpoint; None if unknown, then all weights count as pages of the checkpoint.
        config: the settings.
        dtype: the dtype that `config.dtype` resolves to for the model.
    """
    remaining = None if stored is None else stored.copy()
    tied = getattr(model, "all_tied_weights_keys", {})
    packed = copied = unpacked = 0
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_packed = _is_packed(module, parameter) and not _is_skipped(path, config.skip_modules)
            packed += _packed_bytes(parameter, dtype, config.int4_group) if is_packed else 0
            if parameter.device.type == "meta" and f"{path}.{name}" not in tied:
                nbytes = _copied_bytes(parameter, remaining)
                copied, unpacked = copied + nbytes, unpacked + (0 if is_packed else nbytes)
    return Forecast(packed, copied, unpacked, frees=config.originals != "memory")


def stored_tensors(files: Iterable[str]) -> Stored | None:
    """Count the tensors of safetensors files from their headers; None for other files."""
    counts: Stored = Counter()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dictionary)
                    tensor = tensors.get_slice(name)
                    dtype = _DTYPES.get(tensor.get_dtype())
                    if dtype is not None:
                        counts[dtype, tuple(tensor.get_shape())] += 1
        except (OSError, SafetensorError):
            return None
    return counts


def _tensors_of(state: Mapping[str, torch.Tensor]) -> Stored:
    """Count the tensors of a state dict, which diffusers maps."""
    return Counter((tensor.dtype, tuple(tensor.shape)) for tensor in state.values())


def available_memory() -> int:
    """Return the bytes that this process can still allocate, including swap and the page cache."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    group = cgroup.memory_headroom(drops_used_files=True)
    return machine if group is None else min(machine, group)


def _is_packed(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is the weight of a linear or of experts; convolutions are not counted."""
    if parameter.dim() == 2:
        return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return parameter.dim() == 3 and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)


def _is_skipped(path: str, patterns: Iterable[str]) -> bool:
    parts = path.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for prefix in above for pattern in patterns)


def _packed_bytes(weight: torch.Tensor, dtype: str, group: int) -> int:
    *experts, rows, columns = weight.shape
    parts = shapes_of(rows, columns, dtype, int4_group=group)
    return math.prod(experts) * sum(math.prod(shape) * kind.itemsize for shape, kind in parts)


def _copied_bytes(parameter: torch.Tensor, stored: Stored | None) -> int:
    """Return the bytes of a parameter without an equal tensor in the checkpoint, or else 0. float16 is converted to float32."""
    if parameter.dtype is torch.float16:
        return 2 * parameter.nbytes
    key = (parameter.dtype, tuple(parameter.shape))
    if stored is None or stored[key] > 0:
        if stored is not None:
            stored[key] -= 1
        return 0
    return parameter.nbytes


def _memory_message(
    loading: _Loading, model: nn.Module, stored: Stored | None, dtype: str, available: int
) -> str:
    config = loading.config
    needed = forecast(model, stored, config, dtype)
    parts = [f"{_size(needed.packed)} of weights packed as {dtype}"]
    if needed.copied:
        parts.append(
            f"{_size(needed.copied)} of weights that cannot stay in the checkpoint, because they are cast or joined"
        )
    if loading.packed_later:
        parts.append(f"{_size(loading.packed_later)} for the other models of the pipeline")
    smaller = {
        other: loading.packed_later + forecast(model, stored, config, other).peak
        for other in DTYPES
        if other != dtype
    }
    fitting = [f"dtype={other!r} needs {_size(size)}" for other, size in smaller.items() if size <= available]
    remedy = (
        f"dtypes that fit: {', '.join(fitting)}"
        if fitting
        else "no dtype fits: use a smaller model, or a machine with more memory"
    )
    return (
        f"loading {type(model).__name__} with cpu_optimize needs at least {_size(loading.packed_later + needed.peak)} of memory "
        f"({', '.join(parts)}), but {_size(available)} are available. No weights were loaded; {remedy}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
