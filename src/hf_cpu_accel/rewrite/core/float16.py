"""Cast float16 weights to float32 for the rewrite, and keep calls, state dicts and configs float16 for callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_cpu_accel.checkpoints.stored import is_stored
from hf_cpu_accel.hosts.models import is_model
from hf_cpu_accel.patching.float16 import (
    Float16Forward,
    Float16Method,
    Float16Model,
    Float16Session,
    SwappedClass,
    float16_class,
)
from hf_cpu_accel.patching.float16_originals import HalvingStore
from hf_cpu_accel.patching.inner_forward import has_place, put_inside
from hf_cpu_accel.patching.restore import Journal, add_attribute, replace_attribute, strided_as
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.layer_stacks import layers_of
from hf_cpu_accel.rewrite.core.packed_source import is_placeholder, placeholders, source
from hf_cpu_accel.runtime.mapped_files import MappedFiles

NOTE = "float16 weights: layers that are not packed run in float32; outputs and state_dict() are float16"
# Methods by which users and pipelines call a model besides its forward.
_METHODS = (
    "generate",
    "encode",
    "decode",
    "get_text_features",
    "get_image_features",
    "get_audio_features",
    "get_video_features",
    "get_image_embeddings",
    "get_prompt_embeddings",
)
_SESSION = "init_continuous_batching"


@dataclass(frozen=True)
class CastTensors:
    """A change of `tensors`, parameters and buffers that were float16 with these strides."""

    tensors: list[Tensor]
    strides: list[tuple[int, ...]]
    model: Float16Model

    def undo(self) -> None:
        cast = _once(lambda tensor: tensor.to(self.model.dtype))
        for tensor, strides in zip(self.tensors, self.strides, strict=True):
            tensor.data = strided_as(cast(tensor.data), strides)


class Widening:
    """Cast float16 tensors to float32: those of repeated layers, and of a head, when the rules reach them, others at once.

    A layer is packed before the next one is reached, so that only one of them is in float32, however large the model is.

    Args:
        model: the model for callers.
        owners: the paths of parameters by their addresses, which are kept right.

    Attributes:
        halves: what tensors were that are mapped from a file, by their addresses in float32.
    """

    def __init__(self, model: Float16Model, owners: dict[int, list[str]]) -> None:
        self.model = model
        self.halves: dict[int, Tensor] = {}
        self._owners = owners
        self._mapped = MappedFiles()
        self._waiting: dict[int, list[Tensor]] = {}

    def begin(self, root: nn.Module, tensors: Sequence[Tensor], *, whole: bool) -> None:
        """Cast those of `tensors` that do not wait for their layer; with `whole`, all of them."""
        waiting: set[int] = set()
        alone = Counter(map(_place, tensors))
        wanted = {
            id(tensor): tensor
            for tensor in tensors
            if alone[_place(tensor)] == 1 and len(self._owners.get(tensor.data_ptr(), ())) < 2
        }
        for part in () if whole or source() is not None else (*layers_of(root), *_head(root)):
            inside = [wanted.pop(id(tensor)) for tensor in _float16_tensors(part) if id(tensor) in wanted]
            self._waiting[id(part)] = inside
            waiting.update(map(id, inside))
        self._widen([tensor for tensor in tensors if id(tensor) not in waiting])

    def reach(self, module: nn.Module) -> None:
        """Cast the tensors that wait for `module`."""
        self._widen(self._waiting.pop(id(module), ()))

    def finish(self) -> None:
        """Cast the tensors of layers that were not reached."""
        while self._waiting:
            self._widen(self._waiting.popitem()[1])

    def _widen(self, tensors: Sequence[Tensor]) -> None:
        """Cast tensors; placeholders of packed weights become other placeholders, without memory of their own."""
        current, cast = source(), _once(Tensor.float)
        empty = [tensor for tensor in tensors if is_placeholder(tensor)]
        shapes = [nn.Parameter(torch.empty(t.shape, device="meta"), requires_grad=False) for t in empty]
        others = dict(zip(map(id, empty), placeholders(shapes), strict=True))
        for tensor in tensors:
            half = tensor.data
            tensor.data = others[id(tensor)].data if id(tensor) in others else cast(half)
            before, now = half.data_ptr(), tensor.data_ptr()
            # A weight that was packed meanwhile may have left this address.
            self.halves.pop(now, None)
            if self._mapped.give_back(half) is not None:
                self.halves[now] = half
            if before in self._owners and half.numel():
                self._owners[now] = self._owners[before]
            if current is not None:
                current.move(before, now)


class Float16StateDict:
    """Hook on the state dict of `module` that casts values to their dtypes for callers."""

    def __init__(self, module: nn.Module, names: frozenset[str], model: Float16Model, *, whole: bool) -> None:
        self._module, self._names, self._model, self._whole = module, names, model, whole
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        self._handle = self._module.register_state_dict_post_hook(self)

    def undo(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if (
            prefix and not self._whole
        ):  # the whole model has them all, including weights tied across its parts
            return
        _cast_state(state, [prefix + name for name in self._names], self._model.dtype)


def cast_float16(context: Context) -> None:
    """Cast all float16 parameters and buffers to float32. Those of layers wait until the rules reach the layer, unless calibration
    runs before."""
    tensors = _float16_tensors(context.root)
    if tensors:
        model = Float16Model(frozenset(_float16_names(context.root)), is_all=_is_all_float16(context.root))
        context.journal.record(CastTensors(tensors, [tensor.stride() for tensor in tensors], model))
        widening = context.float16 = Widening(model, context.weights.owners)
        context.store = HalvingStore(context.store, widening.halves)
        widening.begin(context.root, tensors, whole=bool(context.calibration))
        context.results.notes.append(NOTE)


def cast_as_outside(state: dict[str, Any], journal: Journal) -> None:
    """Cast the values of a state dict of the accelerated model to their dtypes for callers."""
    for change in journal.changes:
        if isinstance(change, CastTensors):
            _cast_state(state, change.model.names, change.model.dtype)


def stay_float16_outside(context: Context) -> None:
    """Keep calls from outside, state dicts and saved configs float16."""
    if context.float16 is not None:
        model = context.float16.model
        for path, module in list(context.root.named_modules()):
            if module is context.root or is_model(module):
                _wrap(context, module, path, model)
            elif _is_head(path, module):
                _wrap_forward(context, module, model)


def _wrap(context: Context, module: nn.Module, path: str, model: Float16Model) -> None:
    journal, whole = context.journal, module is context.root
    for name in _METHODS if is_model(module) else ():
        if hasattr(type(module), name):
            replace_attribute(journal, module, name, Float16Method(module, name, model, whole=whole))
    if hasattr(type(module), _SESSION):
        replace_attribute(journal, module, _SESSION, Float16Session(module, _SESSION, model, whole=whole))
    _wrap_forward(context, module, model)
    prefix = f"{path}." if path else ""
    names = frozenset(name.removeprefix(prefix) for name in model.names if name.startswith(prefix))
    hook = Float16StateDict(module, names, model, whole=whole)
    journal.record(hook)
    hook.start()
    if isinstance(getattr(type(module), "dtype", None), property):
        add_attribute(journal, module, "_float16", model)
        journal.record(SwappedClass(module, type(module)))
        module.__class__ = float16_class(type(module))


def _wrap_forward(context: Context, module: nn.Module, model: Float16Model) -> None:
    whole = module is context.root
    if has_place(module):
        put_inside(context.journal, module, Float16Forward(module, model, whole=whole))
    else:
        forward = Float16Method(module, "forward", model, whole=whole)
        replace_attribute(context.journal, module, "forward", forward)


def _is_head(path: str, module: nn.Module) -> bool:
    """Return whether the module is an unpacked linear outside of the layers: users call some of them (`model.lm_head`) directly."""
    return isinstance(module, nn.Linear) and not any(part.isdigit() for part in path.split("."))


def _float16_tensors(root: nn.Module) -> list[Tensor]:
    """Return parameters, buffers and plain attributes of modules, each once, without tensor subclasses and without tensors that
    store quantized weights."""
    found = {
        id(tensor): tensor
        for module in root.modules()
        for holder in (module._parameters, module._buffers, vars(module))
        for name, tensor in holder.items()
        if isinstance(tensor, Tensor) and tensor.dtype is torch.float16 and type(tensor.data) is Tensor
        if not is_stored(module, name)
    }
    return list(found.values())


def _float16_names(root: nn.Module) -> Iterator[str]:
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dtype is torch.float16 and not is_stored(module, name):
                yield f"{path}.{name}" if path else name


def _is_all_float16(root: nn.Module) -> bool:
    return all(
        parameter.dtype is torch.float16
        for module in root.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point() and not is_stored(module, name)
    )


def _cast_state(state: dict[str, Any], names: Iterable[str], dtype: torch.dtype) -> None:
    cast = _once(lambda tensor: tensor.to(dtype))
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            state[name] = cast(value.detach())


def _once(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `cast`, with one result for all tensors in the same memory, such as tied weights."""
    done: dict[tuple[Any, ...], Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return cast(tensor)
        key = _place(tensor)
        if key not in done:
            done[key] = cast(tensor)
        return done[key]

    return once


def _head(root: nn.Module) -> list[nn.Module]:
    """Return the linear if it is the only one that `root` calls itself, so that no rule reads it before its turn."""
    linears: list[nn.Module] = [module for module in root.children() if isinstance(module, nn.Linear)]
    return linears if len(linears) == 1 and not isinstance(root, nn.Sequential) else []


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
