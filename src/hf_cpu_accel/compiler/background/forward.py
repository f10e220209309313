"""What stands in front of a block's forward: tier 1, until a compiled form has shown that it agrees and is faster."""

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

# Calls between two looks, where no compiled form has shown a gain: looking takes as long as some blocks gain.
_REST = 31


@dataclass
class _Use:
    """A compiled form at one block; `verified` once it agreed with tier 1 there, `changed` once tier 1 left traces in the block."""

    form: Form
    bound: BoundBlock
    verified: bool = False
    changed: bool = False


class BlockForward:
    """Called in place of `block.forward`, which stays on the class.

    A switch is one assignment, so a call runs one form or the other. Copies and pickles run tier 1.
    """

    def __init__(self, block: nn.Module, region: Region) -> None:
        self._start(block, region)

    def _start(self, block: nn.Module, region: Region | None) -> None:
        functools.update_wrapper(self, type(block).forward.__get__(block))  # callers look at the signature
        self.block = block
        self.region = region
        self._uses: dict[Key, _Use] = {}
        self._resting = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._resting:
            self._resting -= 1
            return self.tier_one(args, kwargs)
        region = self.region
        if region is None or region.closed or not _is_ordinary():
            return self.tier_one(args, kwargs)
        try:
            key, tensors = flatten(args, kwargs)
        except NotPlain as reason:
            region.other_calls = f"it was called with {reason}"
            return self.tier_one(args, kwargs)
        if wants_derivative(*tensors):
            return self.tier_one(args, kwargs)
        use = self._uses.get(key)
        if use is None and key not in region.forms:
            region.request(self, key, args, kwargs)
            use = self._uses.get(key)
        if use is None:
            return self.tier_one(args, kwargs)
        if use.form.state == "left":
            return self._rest(region, args, kwargs)
        verdict = use.form.verdict(max(tensor.numel() for tensor in tensors))
        if verdict.faster is False:
            return self._rest(region, args, kwargs)
        if verdict.faster and use.verified:
            return self._compiled(use, args, kwargs, tensors)
        if not region.turn(use.form):
            return self.tier_one(args, kwargs)
        return self._both(region, use, args, kwargs, tensors)

    def tier_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)

    def _rest(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not region.gains():
            self._resting = _REST
        return self.tier_one(args, kwargs)

    def offer(self, key: Key, form: Form, bound: BoundBlock) -> None:
        """From now on try `bound` for calls with that key."""
        self._uses[key] = _Use(form, bound)

    def _compiled(
        self, use: _Use, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        try:
            output = use.bound(args, kwargs, tensors)
        except Exception as error:  # the user's call goes on
            use.form.leave(_failure(error))
            output = NotImplemented
        return self.tier_one(args, kwargs) if output is NotImplemented else output

    def _both(
        self, region: Region, use: _Use, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Run both forms, compare and time them; the answer is tier 1's."""
        form = use.form
        before = None if use.verified else (flatten(args, kwargs)[0], _attributes(self.block))
        try:
            if use.bound(args, kwargs, tensors) is NotImplemented:  # also packs what it needs
                return self.tier_one(args, kwargs)
        except Exception as error:
            form.leave(_failure(error))
            return self.tier_one(args, kwargs)
        start = time.perf_counter()
        expected = self.tier_one(args, kwargs)
        middle = time.perf_counter()
        try:
            if before is not None and before != (flatten(args, kwargs)[0], _attributes(self.block)):
                if use.changed:  # for the first time it may be something that is made once
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
    """Which attributes, parameters, buffers and submodules the modules of `block` have; values by their identity."""
    modules = list(block.modules())
    holders = [held for m in modules for held in (vars(m), m._parameters, m._buffers, m._modules)]
    return [{name: id(value) for name, value in held.items()} for held in holders]


def _is_ordinary() -> bool:
    """Whether the call is neither traced nor seen by a mode or global hook, and no dtypes are chosen call by call."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch_private.modes_are_on()
    )


def _failure(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"it failed: {type(error).__name__}: {first[:160]}"
