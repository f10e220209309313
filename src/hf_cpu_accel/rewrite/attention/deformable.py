"""Deformable attention of detectors (Deformable DETR, Grounding DINO, Mask2Former, D-FINE): one op instead of sampling each
image, stacking the samples and summing them.

Hosts have it as a module without weights, or as a function that a module calls by a global name or has as an attribute. It is
recognized by the names of its arguments and by its output. A module that calls such a function runs its own code, with the
function replaced.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import parameter_names
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.deformable_attention import deformable_attention
from hf_cpu_accel.ops.derivatives import wants_derivative
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import EXACT

STRUCTURE = "deformable attention"

_VALUE, _POINTS, _WEIGHTS = "value", "sampling_locations", "attention_weights"
_SHAPES = ("value_spatial_shapes_list", "value_spatial_shapes")
_COUNTS, _METHOD = "num_points_list", "method"
_OTHERS = {"level_start_index", "im2col_step"}  # redundant with the shapes, and a setting for GPUs
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_found: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class FusedDeformableAttention(FusedModuleMixin):
    """Mixed into a module without weights that computes only deformable attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._original_class.forward
        output = _attended(_named(own, (self, *args), kwargs))
        return own(self, *args, **kwargs) if output is None else output


class AroundDeformableAttention(FusedModuleMixin):
    """Mixed into a module whose forward calls a function that computes it.

    Attributes:
        _name: the global name of the function; None if the module calls its own attribute, which is then replaced.
        _function: the original function.
    """

    _name: str | None
    _function: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = self._original_class.forward
        name = self._name
        if name is not None and not is_tracing() and own.__globals__.get(name) is self._function:
            own = _with_ours(own, name, self._function)
        return own(self, *args, **kwargs)


@dataclass(frozen=True)
class Attended:
    """Replacement of such a function of a host."""

    own: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = _attended(_named(self.own, args, kwargs))
        return self.own(*args, **kwargs) if output is None else output


def fuse_deformable_attention(context: Context) -> list[PlanItem]:
    """Replace every such module, or function that a module calls, by one op."""
    return fuse_each(
        context,
        STRUCTURE,
        _match_deformable_attention,
        lambda fused, path: ("deformable_attention", "float32"),
    )


def _match_deformable_attention(module: nn.Module, path: str, context: Context) -> nn.Module | Refusal | None:
    """Return the fused module, or None if the module is of another kind."""
    if isinstance(module, FusedModuleMixin):
        return None
    if not (module._parameters or module._modules or module._buffers):
        if not _is_attention(parameter_names(module.forward), lambda named: module(**named)):
            return None
        return fused_layer(FusedDeformableAttention, module) if _is_free(module, path, context) else None
    name, function = next(_functions_of(module), ("", None))
    if function is None or not _is_free(module, path, context):
        return None
    held = name in vars(module)
    fused: nn.Module = fused_layer(
        AroundDeformableAttention, module, _name=None if held else name, _function=function
    )
    if held:
        vars(fused)[name] = Attended(function)
    return fused


def _is_free(module: nn.Module, path: str, context: Context) -> bool:
    return refusal_to_fuse(module, path, context) is None


def _functions_of(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield the deformable attention functions among the attributes of `module`, and among the global names of its forward."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return
    for name, function in vars(module).items():
        if isinstance(function, FunctionType) and _is_function(function):
            yield name, function
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and _is_function(function) and not _writes(forward):
            yield name, function


def _writes(function: FunctionType) -> bool:
    """Return whether the function writes to its globals, which would be lost."""
    return any(instruction.opname in _WRITES for instruction in dis.get_instructions(function))


def _is_function(function: FunctionType) -> bool:
    if function not in _found:
        _found[function] = _is_attention(parameter_names(function), lambda named: function(**named))
    return _found[function]


class _Globals(dict[str, Any]):
    """The globals of a function, read when needed, with replaced entries."""

    def __init__(self, live: dict[str, Any], **own: Any) -> None:
        super().__init__(own)
        self._live = live

    def __missing__(self, name: str) -> Any:
        return self._live[name]


def _with_ours(own: FunctionType, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `own` with a replacement of `function`, which it calls by this global name."""
    read = _Globals(own.__globals__, **{name: Attended(function)})
    made = FunctionType(own.__code__, read, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _named(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments by name, or None if `function` does not accept them."""
    try:
        return signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return None


def _attended(named: dict[str, Any] | None) -> Tensor | None:
    """Return the output of the op [B, Q, H * D], or None for a call that it does not support."""
    if named is None:
        return None
    value, points, weights = (named[name] for name in (_VALUE, _POINTS, _WEIGHTS))
    shapes = next((named[name] for name in _SHAPES if isinstance(named.get(name), list | tuple)), None)
    tensors = all(isinstance(t, Tensor) and t.is_floating_point() for t in (value, points, weights))
    if not tensors or shapes is None:
        return None
    if is_tracing() or named.get(_METHOD, "default") != "default" or value.dtype not in WEIGHT_DTYPES:
        return None
    if points.dtype != value.dtype or torch.promote_types(value.dtype, weights.dtype) != value.dtype:
        return None
    if wants_derivative(value, points, weights):
        return None
    value, points, weights = (ordinary(t) for t in (value, points, weights))
    counts = named.get(_COUNTS)
    if counts is None:
        if points.dim() != 6:
            return None
        counts = [points.shape[4]] * len(shapes)
        points, weights = points.flatten(3, 4), weights.flatten(3)
    value = value if value.stride(-1) == 1 else value.contiguous()
    try:
        sizes = [(int(height), int(width)) for height, width in shapes]
        return deformable_attention(
            value, sizes, counts, points.float().contiguous(), weights.float().contiguous()
        )
    except (TypeError, ValueError):  # the host's own code raises the error
        return None


def _is_attention(names: tuple[str, ...], own: Callable[[dict[str, Any]], Any]) -> bool:
    """Return whether a function of arguments with these names agrees with the op, for points inside of two images and outside."""
    known = {_VALUE, _POINTS, _WEIGHTS, *_SHAPES, _COUNTS, _METHOD, *_OTHERS}
    shapes = [name for name in _SHAPES if name in names]
    if not shapes or not {_VALUE, _POINTS, _WEIGHTS} <= set(names) <= known:
        return False
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 22, 2, 8, generator=generator, dtype=torch.float32)
    points = torch.rand(2, 7, 2, 2, 3, 2, generator=generator, dtype=torch.float32) * 1.6 - 0.3
    weights = torch.rand(2, 7, 2, 2, 3, generator=generator, dtype=torch.float32)
    sizes = [(3, 4), (2, 5)]
    named: dict[str, Any] = {_VALUE: value, _POINTS: points, _WEIGHTS: weights, "im2col_step": 64}
    named |= {
        "level_start_index": torch.tensor([0, 12]),
        "value_spatial_shapes": torch.tensor(sizes),
        shapes[0]: sizes,
    }
    if _COUNTS in names:
        named |= {_POINTS: points.flatten(3, 4), _WEIGHTS: weights.flatten(3), _COUNTS: [3, 3]}
    named = {name: given for name, given in named.items() if name in names}
    with torch.no_grad():
        expected = call_foreign(own, named)
        ours = _attended(named)
    return compare(ours, expected).within(EXACT)
