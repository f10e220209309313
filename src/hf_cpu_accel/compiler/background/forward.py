"""The replacement of a block's forward: it runs level 1 until a compiled form has proved equal and faster."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.background.bound import BoundBlock
from hf_cpu_accel.compiler.background.calls import Key, NotPlain, flatten
from hf_cpu_accel.compiler.background.region import Form, Region
from hf_cpu_accel.compiler.background.verdict import disagreement
from hf_cpu_accel.ops.derivatives import wants_derivative

# Calls between two checks, where no compiled form is faster: a check takes as long as some blocks gain.
_REST = 31


@dataclass
class _Use:
    """A compiled form at one block.

    Attributes:
        verified: the form agreed with level 1 at this block.
        changed: level 1 changed the block or its arguments in one call.
    """

    form: Form
    bound: BoundBlock
    verified: bool = False
    changed: bool = False


class BlockForward:
    """Replaces `block.forward`, which stays on the class.

    Switching forms is one assignment, so each call runs one form. Copies and pickles run level 1.
    """

    def __init__(self, block: nn.Module, region: Region) -> None:
        self._start(block, region)

    def _start(self, block: nn.Module, region: Region | None) -> None:
        functools.update_wrapper(self, type(block).forward.__get__(block))  # callers inspect the signature
        self.block = block
        self.region = region
        self._uses: dict[Key, _Use] = {}
        self._resting = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._resting:
            self._resting -= 1
            return self.level_one(args, kwargs)
        region = self.region
        if region is None or region.closed or not _is_ordinary():
            return self.level_one(args, kwargs)
        try:
            key, tensors = flatten(args, kwargs)
        except NotPlain as reason:
            region.other_calls = f"it was called with {reason}"
            return self.level_one(args, kwargs)
        if wants_derivative(*tensors):
            return self.level_one(args, kwargs)
        use = self._uses.get(key)
        if use is None and key not in region.forms:
            region.request(self, key, args, kwargs)
            use = self._uses.get(key)
        if use is None:
            return self.level_one(args, kwargs)
        if use.form.state == "left":
            return self._rest(region, args, kwargs)
        verdict = use.form.verdict(max(tensor.numel() for tensor in tensors))
        if verdict.faster is False:
            return self._rest(region, args, kwargs)
        if verdict.faster and use.verified:
            return self._compiled(use, args, kwargs, tensors)
        if not region.turn(use.form):
            return self.level_one(args, kwargs)
        return self._both(region, use, args, kwargs, tensors)

    def level_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)

    def _rest(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not region.gains():
            self._resting = _REST
        return self.level_one(args, kwargs)

    def offer(self, key: Key, form: Form, bound: BoundBlock) -> None:
        """Try `bound` for later calls with that key."""
        self._uses[key] = _Use(form, bound)

    def _compiled(
        self, use: _Use, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        try:
            output = use.bound(args, kwargs, tensors)
        except Exception as error:  # the user's call goes on
            use.form.leave(_failure(error))
            output = NotImplemented
        return self.level_one(args, kwargs) if output is NotImplemented else output

    def _both(
        self, region: Region, use: _Use, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Run both forms, compare and time them, and return the output of level 1."""
        form = use.form
        before = None if use.verified else (flatten(args, kwargs)[0], _attributes(self.block))
        try:
            if use.bound(args, kwargs, tensors) is NotImplemented:  # also packs what it needs
                return self.level_one(args, kwargs)
        except Exception as error:
            form.leave(_failure(error))
            return self.level_one(args, kwargs)
        start = time.perf_counter()
        expected = self.level_one(args, kwargs)
        middle = time.perf_counter()
        try:
            if before is not None and before != (flatten(args, kwargs)[0], _attributes(self.block)):
                if use.changed:  # the first change may be a value that the block caches
                    form.leave("it changes its arguments or attributes while it runs")
                use.changed = True
                return expected
            output = use.bound(args, kwargs, tensors)
            end = time.perf_counter()
            if output is NotImplemented:
                return expected
            difference = disagreement(output, expected, region.dtype)
        except Exception as error:
            form.leave(_failure(error))
            return expected
        if difference is not None:
            form.leave(f"the compiled form does not agree with level 1: {difference}")
            return expected
        use.verified = True
        form.verdict(max(tensor.numel() for tensor in tensors)).add(middle - start, end - middle)
        return expected

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self.block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["block"], None)


def _attributes(block: nn.Module) -> list[dict[str, int]]:
    """Return the attributes, parameters, buffers and submodules of all modules of `block`, as {name: id of the value}."""
    modules = list(block.modules())
    holders = [part for m in modules for part in (vars(m), m._parameters, m._buffers, m._modules)]
    return [{name: id(value) for name, value in holder.items()} for holder in holders]


def _is_ordinary() -> bool:
    """Return whether the call is neither traced nor under autocast, and no mode or global hook is active."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch_private.modes_are_on()
    )


def _failure(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"it failed: {type(error).__name__}: {first[:160]}"
