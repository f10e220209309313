"""float16 weights: cast to float32 before anything is looked at, and float16 again for whoever looks from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from hf_cpu_accel.patching.inner_forward import has_place, put_inside
from hf_cpu_accel.patching.originals import OriginalsStore, Ticket
from hf_cpu_accel.patching.restore import Journal, add_attribute, replace_attribute, strided_as
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, weight_owners
from hf_cpu_accel.rewrite.core.packed_source import is_placeholder, placeholders, source
from hf_cpu_accel.runtime.mapped_files import MappedFiles

NOTE = (
    "float16 weights: computed in float32 outside of the packed layers; outputs and state_dict() are float16"
)
# By which users and pipelines call a model besides its forward.
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
    """`tensors`, parameters and buffers, were float16, and lay in these strides."""

    tensors: list[Tensor]
    strides: list[tuple[int, ...]]
    model: Float16Model

    def undo(self) -> None:
        cast = _once(lambda tensor: tensor.to(self.model.dtype))
        for tensor, strides in zip(self.tensors, self.strides, strict=True):
            tensor.data = strided_as(cast(tensor.data), strides)


class HalvingStore:
    """A store that keeps float32 values which float16 holds as float16, in half the space.

    `halves`: those that are mapped from a file, by the addresses of their float32 values.
    """

    def __init__(self, store: OriginalsStore, halves: dict[int, Tensor]) -> None:
        self._store = store
        self._halves = halves

    def put(self, tensor: Tensor) -> Ticket:
        if tensor.dtype is not torch.float32:
            return self._store.put(tensor)
        half = self._halves.get(tensor.data_ptr())
        if half is None or half.shape != tensor.shape:
            half = tensor.to(torch.float16)
        return self._store.put(half if torch.equal(half.to(tensor.dtype), tensor) else tensor)

    def get(self, ticket: Ticket) -> Tensor:
        return self._store.get(ticket)

    def give_back(self, tensor: Tensor) -> object:
        return self._store.give_back(tensor)

    def check(self) -> None:
        self._store.check()

    def commit(self) -> None:
        self._halves.clear()
        self._store.commit()


class Float16StateDict:
    """Called with a state dict of `module`, whose values it casts to what they are to the outside."""

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
        ):  # that of the whole model has them all, and what is tied across its parts
            return
        _cast_state(state, [prefix + name for name in self._names], self._model.dtype)


def cast_float16(context: Context) -> Iterable[PlanItem]:
    """Have all float16 parameters and buffers be float32 from here on."""
    tensors = _float16_tensors(context.root)
    if tensors:
        model = Float16Model(frozenset(_float16_names(context.root)), is_all=_is_all_float16(context.root))
        context.journal.record(CastTensors(tensors, [tensor.stride() for tensor in tensors], model))
        context.store = HalvingStore(context.store, _widen(tensors))
        context.float16 = model
        context.owners = weight_owners(context.root)
        context.notes += (NOTE,)
    return ()


def cast_as_outside(state: dict[str, Any], journal: Journal) -> None:
    """Cast what a state dict of the accelerated model holds to what it is to the outside."""
    for change in journal.changes:
        if isinstance(change, CastTensors):
            _cast_state(state, change.model.names, change.model.dtype)


def _widen(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Cast them in place. Placeholders of packed weights become other placeholders, which have no memory of their own.

    Returns:
        What they were, by their new addresses, where that is mapped from a file.
    """
    current, cast = source(), _once(Tensor.float)
    mapped, halves = MappedFiles(), {}
    empty = [tensor for tensor in tensors if is_placeholder(tensor)]
    shapes = [nn.Parameter(torch.empty(t.shape, device="meta"), requires_grad=False) for t in empty]
    others = dict(zip(map(id, empty), placeholders(shapes), strict=True))
    for tensor in tensors:
        half = tensor.data
        tensor.data = others[id(tensor)].data if id(tensor) in others else cast(half)
        if mapped.give_back(half) is not None:
            halves[tensor.data_ptr()] = half
        if current is not None:
            current.move(half.data_ptr(), tensor.data_ptr())
    return halves


def stay_float16_outside(context: Context) -> Iterable[PlanItem]:
    """Have calls from outside, state dicts and saved configs be float16 as before."""
    model = context.float16
    if model is not None:
        for path, module in list(context.root.named_modules()):
            if module is context.root or is_model(module):
                _wrap(context, module, path, model)
            elif _is_head(path, module):
                _wrap_forward(context, module, model)
    return ()


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
    """Whether it is a linear outside of the layers that was left as it is: users call some (`model.lm_head`) on their own."""
    return isinstance(module, nn.Linear) and not any(part.isdigit() for part in path.split("."))


def _float16_tensors(root: nn.Module) -> list[Tensor]:
    """Parameters, buffers and plain attributes of modules, each once; none of a subclass, which knows its values itself, and none
    that a quantised weight is stored in."""
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
    """`cast` that gives one tensor for all that lie in the same memory, as weights that are tied do."""
    done: dict[tuple[Any, ...], Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return cast(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in done:
            done[key] = cast(tensor)
        return done[key]

    return once
