"""A forecast of the memory that `from_pretrained(..., cpu_optimize=...)` needs, before a weight is read: what cannot fit is refused
in words, where the kernel would end the process.

It is a lower bound, so that nothing is refused that would fit: packed weights, and weights that are not pages of the checkpoint
because they are cast, or made of several of its tensors. Buffers of calls, caches and the host's own memory come on top.
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
"""How many tensors of a dtype and shape the files of a checkpoint have."""


@dataclass(frozen=True)
class Forecast:
    """Bytes that loading a model takes at least.

    Attributes:
        packed: of packed weights.
        copied: of weights that are not pages of the checkpoint, and `kept` those of them that are not packed.
        frees: whether these go as they are packed.
    """

    packed: int
    copied: int
    kept: int
    frees: bool

    @property
    def peak(self) -> int:
        return max(self.copied, self.kept + self.packed) if self.frees else self.copied + self.packed


class _Loading:
    """One call with `cpu_optimize`: of a pipeline, the models of which are packed when all are loaded."""

    def __init__(self, config: CPUAccelConfig) -> None:
        self.config = config
        self.packed_later = 0


_current: ContextVar[_Loading | None] = ContextVar("a call with cpu_optimize", default=None)


def forecasting(config: CPUAccelConfig) -> AbstractContextManager[None]:
    """Inside, models are loaded to be accelerated with `config`: those that cannot fit are refused.

    Raises:
        MemoryError: naming what is needed, what is available, and what would fit.
    """
    return within(_current, _Loading(config))


def patch_loader(owner: type, patches: HostPatches) -> None:
    """Have the host's `_load_pretrained_model`, which is given the model without weights and the files, begin with a forecast."""
    original = vars(owner).get("_load_pretrained_model")
    if not isinstance(original, classmethod | staticmethod):
        return  # another version of the host: no forecast
    function = original.__func__
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        loading = _current.get()
        if loading is not None and patches.active:
            _check(loading, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    patches.replace(owner, "_load_pretrained_model", type(original)(wrapper))


def _check(loading: _Loading, given: Mapping[str, Any]) -> None:
    model, state = given.get("model"), given.get("state_dict")
    files = given.get("checkpoint_files", given.get("resolved_model_file"))
    quantizer = given.get("hf_quantizer") or getattr(given.get("load_config"), "hf_quantizer", None)
    if not isinstance(model, nn.Module) or not (state or files) or quantizer is not None:
        return
    dtype = plans.make(loading.config, model, threads=1, thread_reason="").dtype
    stored = _tensors_of(state) if state else stored_tensors(files)
    found = forecast(model, stored, loading.config, dtype)
    available = available_memory()
    if loading.packed_later + found.peak > available:
        raise MemoryError(_refusal(loading, model, stored, dtype, available))
    loading.packed_later += found.packed


def forecast(model: nn.Module, stored: Stored | None, config: CPUAccelConfig, dtype: str) -> Forecast:
    """What loading `model`, whose parameters are on the meta device, takes at least.

    Args:
        stored: the tensors of its checkpoint; None if unknown, then all are taken for pages of it.
        dtype: what `config.dtype` means for it.
    """
    left = None if stored is None else stored.copy()
    tied = getattr(model, "all_tied_weights_keys", {})
    packed = copied = kept = 0
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_packed = _is_packed(module, parameter) and not _is_skipped(path, config.skip_modules)
            packed += _packed_bytes(parameter, dtype, config.int4_group) if is_packed else 0
            if parameter.device.type == "meta" and f"{path}.{name}" not in tied:
                nbytes = _copied_bytes(parameter, left)
                copied, kept = copied + nbytes, kept + (0 if is_packed else nbytes)
    return Forecast(packed, copied, kept, frees=config.originals != "memory")


def stored_tensors(files: Iterable[str]) -> Stored | None:
    """What the headers of safetensors files say; None for other files."""
    found: Stored = Counter()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no dictionary)
                    tensor = tensors.get_slice(name)
                    dtype = _DTYPES.get(tensor.get_dtype())
                    if dtype is not None:
                        found[dtype, tuple(tensor.get_shape())] += 1
        except (OSError, SafetensorError):
            return None
    return found


def _tensors_of(state: Mapping[str, torch.Tensor]) -> Stored:
    """The same of a state dict: that of diffusers is mapped."""
    return Counter((tensor.dtype, tuple(tensor.shape)) for tensor in state.values())


def available_memory() -> int:
    """Bytes that this process can still get, swap and what the system keeps of files included."""
    machine = psutil.virtual_memory().available + psutil.swap_memory().free
    group = cgroup.memory_headroom(drops_used_files=True)
    return machine if group is None else min(machine, group)


def _is_packed(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether it is the weight of a linear, or of experts. What convolutions become is not counted."""
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
    """What the parameter takes if no tensor of the checkpoint is what it is; float16 is carried in float32."""
    if parameter.dtype is torch.float16:
        return 2 * parameter.nbytes
    key = (parameter.dtype, tuple(parameter.shape))
    if stored is None or stored[key] > 0:
        if stored is not None:
            stored[key] -= 1
        return 0
    return parameter.nbytes


def _refusal(loading: _Loading, model: nn.Module, stored: Stored | None, dtype: str, available: int) -> str:
    config = loading.config
    found = forecast(model, stored, config, dtype)
    parts = [f"{_size(found.packed)} of weights packed as {dtype}"]
    if found.copied:
        parts.append(
            f"{_size(found.copied)} of weights that cannot stay in the checkpoint, since they are cast or joined"
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
        f"of the other dtypes, {', '.join(fitting)}"
        if fitting
        else "no dtype fits: take a smaller model, or a machine with more memory"
    )
    return (
        f"loading {type(model).__name__} with cpu_optimize needs at least {_size(loading.packed_later + found.peak)} of memory "
        f"({', '.join(parts)}), and {_size(available)} are available. No weights were loaded; {remedy}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
