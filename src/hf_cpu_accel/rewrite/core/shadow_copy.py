"""Copies of modules that share their weights. Matchers run these shadows, so that the model itself stays untouched.

A model may serve requests while a part of it is matched. The shadow of a tree of modules has the same parameters, buffers and
plain attributes, but its own modules and its own dictionaries for parameters and hooks. It calls no hooks: neither those of
torch, which belong to the user, nor forwards that diffusers and accelerate set.

The weights are still those of the model. A forward that writes to them is stopped, for example an adapter of peft that unmerges
itself when it is called while disabled: see `running`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_cpu_accel.guard.stores import observe_stores
from hf_cpu_accel.patching.hooks import HOOKS_OF_DIFFUSERS
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign, ours
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.runtime.torch_modes import AroundOps

M = TypeVar("M", bound=nn.Module)

# accelerate keeps its hook, and the forward that it replaced, in these attributes.
_OF_ACCELERATE = ("_hf_hook", "_old_forward")
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
# Lists of lists of modules are known (stages of blocks), none deeper.
_DEEPEST = 3
_MOST_COPIED = 1 << 20  # bytes of a buffer


class Shadow:
    """The copies of the modules of `root`.

    Raises:
        Refused: a class of modules makes no instance without arguments.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._copies = {id(m): required(call_foreign(type(m).__new__, type(m))) for m in modules}
        self._originals = {id(self._copies[id(m)]): m for m in modules}
        for module in modules:
            self._fill(self._copies[id(module)], module)
        self.module = self.of(root)

    def of(self, module: M) -> M:
        """Return the copy of `module`, or `module` itself if it is outside of the tree."""
        made: M = self._copies.get(id(module), module)
        return made

    def original(self, copied: M) -> M:
        """Return the original of `copied`, or `copied` itself if it is no copy."""
        original: Any = self._originals.get(id(copied), copied)
        made: M = original
        return made

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allow calls of the copies inside the context. Nothing is measured there, and writes to shared tensors raise.

        Raises:
            OwnError: of `Refused`, in the place of an op that writes to a parameter or buffer.
        """
        refusing = AroundOps(partial(_refuse_writes, self._shared()))
        with disable_grouping(), observe_stores(self._copies.values()), refusing:
            yield

    def _shared(self) -> set[int]:
        modules = self._originals.values()
        held = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        return {_address(tensor) for tensor in held if tensor is not None} - {0}

    def _fill(self, made: nn.Module, module: nn.Module) -> None:
        state = dict(vars(module))
        if _hooks_a_forward(module):
            del state["forward"]
        for name in (HOOKS_OF_DIFFUSERS, *_OF_ACCELERATE, "_compiled_call_impl"):
            state.pop(name, None)
        held = {name: self._mapped(value, _DEEPEST) for name, value in state.items()}
        held |= {name: OrderedDict() for name in _HOOKS}
        held["_parameters"] = dict(state["_parameters"])
        held["_buffers"] = _buffers(module)
        held["_modules"] = {
            name: None if child is None else self.of(child) for name, child in module._modules.items()
        }
        held["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        if "_hooks_inside" in state:  # of a fused module
            held |= {"_hooks_inside": (), "_guard": None}
        made.__dict__.update(held)

    def _mapped(self, value: Any, depth: int) -> Any:
        """Return `value` with copies in place of modules, and with methods of copies in place of methods of modules."""
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, Override):
            return self._rebound(value)
        owner = getattr(value, "__self__", None)
        if hasattr(value, "__func__") and id(owner) in self._copies:
            return value.__func__.__get__(self._copies[id(owner)])
        if depth and type(value) in (list, tuple):
            parts = [self._mapped(part, depth - 1) for part in value]
            return type(value)(parts) if _differ(parts, value) else value
        if depth and type(value) is dict:
            parts = [self._mapped(part, depth - 1) for part in value.values()]
            return dict(zip(value, parts, strict=True)) if _differ(parts, value.values()) else value
        return value

    def _rebound(self, override: Override) -> Override:
        made = copy.copy(override)
        made.model = self.of(override.model) if isinstance(override.model, nn.Module) else override.model
        return made


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers for a shadow of `module`: copies if the module has nothing else, since rotary positions that depend on the
    length write to theirs in every call."""
    buffers = dict(module._buffers)
    if module._parameters or module._modules:
        return buffers
    return {
        name: b.clone() if b is not None and b.nbytes <= _MOST_COPIED else b for name, b in buffers.items()
    }


def _hooks_a_forward(module: nn.Module) -> bool:
    """Return whether a hook of diffusers or accelerate replaces the forward of the module."""
    state = vars(module)
    return "forward" in state and (HOOKS_OF_DIFFUSERS in state or _OF_ACCELERATE[0] in state)


def shadow_of(module: M) -> M:
    """Return a shadow copy of `module`."""
    return Shadow(module).of(module)


def _refuse_writes(addresses: set[int], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, and refuse it if it writes to the memory at these addresses."""
    if op._schema.is_mutable:
        with ours():
            _check(addresses, op._schema, args, kwargs)
    return op(*args, **kwargs)


def _check(addresses: set[int], schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.is_write and isinstance(value, Tensor) and _address(value) in addresses:
            raise Refused(Refusal(f"its forward writes to its weights ({schema.name})"))


def _address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, or 0 if it has none of its own."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _differ(parts: Any, values: Any) -> bool:
    return any(part is not value for part, value in zip(parts, values, strict=True))
