"""Convolutions that wait for a following norm, residual and activation, to compute them in one call.

A host calls a convolution, then a batch norm, adds a residual, and applies an activation, each anywhere in its code. So the
convolution returns a tensor without values. An op that can join returns another one, and the first op that reads values computes
everything at once. A reader of the convolution's own output, such as a hook, gets its values: the order of calls does not
matter. Where waiting gains nothing, or computes a convolution twice, it stops waiting.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, VersionGuard, ordinary
from hf_cpu_accel.ops.derivatives import refuse_transforms
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.rewrite.convolution.epilogue import NORMALIZED, PLAIN, Epilogue, leaky_name
from hf_cpu_accel.rewrite.core.norm_fold import Fold
from hf_cpu_accel.runtime.tracing import is_tracing

# The output of `packing.convolution.pack_conv2d`, and the bias.
OwnWeight = tuple[PackedWeight, Tensor | None]

_ATEN = torch.ops.aten
_WAITS = "convolution"


class DeferringConvolution(nn.Module):
    """Mixin for replacements of convolutions.

    Attributes:
        fold: the norm that follows, or None.
        waits: whether the output waits at all;
        adds, activates: for a residual, for an activation.
    """

    kernel_size: tuple[int, ...]
    fold: Fold | None = None
    waits: bool = False
    adds: bool = True
    activates: bool = True

    @abstractmethod
    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        """Compute [N, C, *sizes] -> [N, out_channels, *sizes'], channels last.

        If there is a norm, an epilogue without it has no other parts either.
        """

    def own_weight(self, *, normalized: bool) -> OwnWeight | None:
        """Return the weight for the kernels of this package, with its norm or without, or None if they do not have it."""
        return None

    @abstractmethod
    def supports(self, activation: str, *, residual: bool) -> bool:
        """Return whether `compute` supports the two together."""

    @abstractmethod
    def output_shape(self, input: Tensor) -> tuple[int, ...] | None:
        """Return the shape of the output for `input`, or None if `compute` does not support it."""

    def run(self, input: Tensor) -> Tensor:
        """Return the output for `input` [N, C, *sizes], computed now or later."""
        if is_tracing():  # nothing can wait: in traced graphs the convolution applies its norm
            return self.compute(input, PLAIN if self.fold is None else NORMALIZED)
        refuse_transforms("an accelerated convolution", input)
        shape = self.output_shape(input) if self.waits else None
        if shape is None:
            return self.compute(input, PLAIN)
        return DeferredConvolution.of(_Call(self, VersionGuard(input, _WAITS)), shape, input.dtype)


class DeferredConvolution(LazyTensor):
    """The output of a convolution before the following op is known."""

    _call: _Call
    _normalized: bool
    _residual: VersionGuard | None

    @classmethod
    def of(cls, call: _Call, shape: Sequence[int], dtype: torch.dtype) -> DeferredConvolution:
        _, channels, *sizes = shape
        steps = [channels * math.prod(sizes[dimension:]) for dimension in range(len(sizes) + 1)]
        deferred: DeferredConvolution = cls.like(shape, dtype, (steps[0], 1, *steps[1:]))
        deferred._call, deferred._normalized, deferred._residual = call, False, None
        return deferred

    def normalized(self, fold: Fold) -> DeferredConvolution | None:
        """Return the output with the norm `fold`, or None if that is not the norm of this convolution."""
        with self._lock:
            if self._tensor is not None or self._normalized or self._call.convolution.fold is not fold:
                return None
            return self._followed(True, None)

    def _followed(self, normalized: bool, residual: VersionGuard | None) -> DeferredConvolution:
        deferred = DeferredConvolution.of(self._call, self.shape, self.dtype)
        deferred._normalized, deferred._residual = normalized, residual
        return deferred

    def _make(self) -> Tensor:
        return self._compute("none")

    def _forget(self) -> None:
        del self._call, self._residual  # and with them the input

    def _compute(self, activation: str) -> Tensor:
        """Return the output, computed again if it was computed with another epilogue before."""
        residual = None if self._residual is None else self._residual.tensor()
        return self._call.compute(Epilogue(self._normalized, residual, activation))

    @property
    def _is_open(self) -> bool:
        """Return whether a residual or an activation may join."""
        return self._tensor is None and (self._normalized or self._call.convolution.fold is None)

    def _activated(self, activation: str, *, in_place: bool) -> Tensor | None:
        with self._lock:
            if not self._is_open or not self._call.convolution.activates:
                return None
            if not self._call.convolution.supports(activation, residual=self._residual is not None):
                return None
            output = self._compute(activation)
            if in_place:
                self._tensor = output
            return output

    def _added(self, residual: object, *, in_place: bool) -> DeferredConvolution | None:
        if not self._adds or residual is self or not isinstance(residual, Tensor):
            return None
        if residual.shape != self.shape or residual.dtype != self.dtype:
            return None
        # Before the lock: another thread may add the two in the other order.
        guard = VersionGuard(ordinary(residual), _WAITS)
        with self._lock:
            if not self._adds:
                return None
            if not in_place:
                return self._followed(self._normalized, guard)
            self._residual = guard
            return self

    @property
    def _adds(self) -> bool:
        return self._is_open and self._residual is None and self._call.convolution.adds

    def _unchanged(self) -> DeferredConvolution | None:
        with self._lock:
            return self._followed(self._normalized, self._residual) if self._is_open else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        join = JOINS.get(func)
        output = None if join is None else join(args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs) if output is None else output


class _Call:
    """One call of a convolution, shared by all tensors from its output."""

    def __init__(self, convolution: DeferringConvolution, input: VersionGuard) -> None:
        self.convolution = convolution
        self._input = input
        self._before: Epilogue | None = None

    def compute(self, epilogue: Epilogue) -> Tensor:
        convolution = self.convolution
        if epilogue.residual is None and epilogue.activation == "none" and convolution.fold is None:
            convolution.waits = False  # nothing joined
        if self._before is not None:  # its output with a joined op is useless for another reader
            if self._before.activation != "none" or epilogue.activation != "none":
                convolution.activates = False
            else:
                convolution.adds = False
        self._before = epilogue
        return convolution.compute(self._input.tensor(), epilogue)


def _activation(name: str, *, in_place: bool = False) -> Callable[[Any, Any], Tensor | None]:
    return lambda args, kwargs: args[0]._activated(name, in_place=in_place)


def _gelu(args: Any, kwargs: Any) -> Tensor | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return args[0]._activated(names[kwargs.get("approximate", "none")], in_place=False)


def _clamped(args: Any, kwargs: Any, *, in_place: bool = False) -> Tensor | None:
    """Return the output with ReLU6, which is a hardtanh from 0 to 6, or None for other bounds."""
    return args[0]._activated("relu6", in_place=in_place) if args[1:] == (0, 6) and not kwargs else None


def _leaky(args: Any, kwargs: Any, *, in_place: bool = False) -> Tensor | None:
    name = leaky_name(args, kwargs)
    return None if name is None else args[0]._activated(name, in_place=in_place)


def _sum(args: Any, kwargs: Any, *, in_place: bool = False) -> Tensor | None:
    first, second = args
    if kwargs.get("alpha", 1) != 1:
        return None
    output = first._added(second, in_place=in_place) if isinstance(first, DeferredConvolution) else None
    if output is None and not in_place and isinstance(second, DeferredConvolution):
        output = second._added(first, in_place=False)
    return output


def _quotient(args: Any, kwargs: Any) -> Tensor | None:
    """Return the output divided by a factor, which is mostly 1 in networks of diffusers."""
    deferred, divisor = args
    if (
        kwargs
        or type(divisor) not in (int, float)
        or divisor != 1
        or not isinstance(deferred, DeferredConvolution)
    ):
        return None
    return deferred._unchanged()


JOINS: dict[Any, Callable[[Any, Any], Tensor | None]] = {
    _ATEN.relu.default: _activation("relu"),
    _ATEN.relu_.default: _activation("relu", in_place=True),
    _ATEN.silu.default: _activation("silu"),
    _ATEN.silu_.default: _activation("silu", in_place=True),
    _ATEN.gelu.default: _gelu,
    _ATEN.hardtanh.default: _clamped,
    _ATEN.hardtanh_.default: partial(_clamped, in_place=True),
    _ATEN.leaky_relu.default: _leaky,
    _ATEN.leaky_relu_.default: partial(_leaky, in_place=True),
    _ATEN.hardswish.default: _activation("hardswish"),
    _ATEN.hardswish_.default: _activation("hardswish", in_place=True),
    _ATEN.add.Tensor: _sum,
    _ATEN.add_.Tensor: partial(_sum, in_place=True),
    _ATEN.div.Tensor: _quotient,
}
