"""What a transformer layer does, seen from outside: the ops that it runs on packed linears, attention and norms, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.activations import identify, is_library_function
from hf_cpu_accel.rewrite.norm import identify_norm
from hf_cpu_accel.rewrite.packed_linear import PackedLinear

_OPS = torch.ops.hf_cpu_accel
_LINEAR, _FFN, _ATTENTION = _OPS.linear.default, _OPS.ffn.default, _OPS.attention.default
_TIMES, _COPY = torch.ops.aten.mul.Tensor, torch.ops.aten.clone.default
_LAYER_NORMS = (_OPS.layer_norm.default, torch.ops.aten.native_layer_norm.default)


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention op: the linears that made query, key and value, and how it was called."""

    query: PackedLinear
    key: PackedLinear
    value: PackedLinear
    heads: int
    key_heads: int
    head_size: int
    scale: float | None


@dataclass(eq=False)
class LayerTrace(TorchDispatchMode):
    """Records one forward of `layer`, whose linears are packed already.

    Attributes:
        linears: the packed linears in the order in which they were used.
        norms: the layer norms in the order in which they were used.
        attention: the attention calls; None for one that is causal, has a bias, or does not follow three linears.
        activations: the activations that the layer may hold, "none" if it has none.
    """

    layer: nn.Module
    linears: list[PackedLinear] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    attention: list[AttentionCall | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._packed = {
            m.packed.data.data_ptr(): m for m in self.layer.modules() if isinstance(m, PackedLinear)
        }
        norms = [module for module in self.layer.modules() if _is_layer_norm(module)]
        self._norms = {norm.get_parameter("weight").data_ptr(): norm for norm in norms}
        self._made_by: dict[int, tuple[PackedLinear, float]] = {}  # a linear's output, times a factor
        self._alive: list[
            Any
        ] = []  # freed memory would be given to another tensor, and addresses could not be told apart

    @property
    def activations(self) -> list[str]:
        held = [
            value
            for module in self.layer.modules()
            for value in vars(module).values()
            if is_library_function(value)
        ]
        names = {
            identify(value) for value in [*held, *self.layer.modules()] if not isinstance(value, PackedLinear)
        }
        names.discard("none")  # dropouts and identities
        return [name for name in ACTIVATIONS if name in names] or ["none"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._alive.append((args, output))
        if func is _LINEAR:
            self._linear(args[1], output)
        elif func is _FFN:
            self._linear(args[1], None)
            self._linear(args[4], output)
        elif func is _ATTENTION:
            self.attention.append(self._attention_call(*args))
        elif func in _LAYER_NORMS:
            self._norm(args)
        elif func in (_TIMES, _COPY) and isinstance(args[0], Tensor):
            self._pass_on(args[0], args[1] if func is _TIMES else 1.0, output)
        return output

    def _linear(self, weight: Tensor, output: Tensor | None) -> None:
        packed = self._packed.get(weight.data_ptr())
        if packed is not None:
            self.linears.append(packed)
            if output is not None:
                self._made_by[_storage(output)] = packed, 1.0

    def _pass_on(self, input: Tensor, factor: Any, output: Tensor) -> None:
        """Whisper multiplies its queries by the scale of attention, and copies them and its keys."""
        maker = self._made_by.get(_storage(input))
        if maker is not None and isinstance(factor, float):
            self._made_by[_storage(output)] = maker[0], maker[1] * factor

    def _norm(self, args: tuple[Any, ...]) -> None:
        weights = [arg for arg in args[1:] if isinstance(arg, Tensor)]
        norm = self._norms.get(weights[0].data_ptr()) if weights else None
        if norm is not None:
            self.norms.append(norm)

    def _attention_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> AttentionCall | None:
        makers = [self._made_by.get(_storage(tensor)) for tensor in (query, key, value)]
        made_query, made_key, made_value = makers
        if made_query is None or made_key is None or made_value is None or is_causal or mask is not None:
            return None
        if made_key[1] != 1.0 or made_value[1] != 1.0:
            return None
        heads, head_size = query.shape[1], query.shape[3]
        if made_query[1] != 1.0:
            scale = made_query[1] * (head_size**-0.5 if scale is None else scale)
        linears = (made_query[0], made_key[0], made_value[0])
        return AttentionCall(*linears, heads, key.shape[1], head_size, scale)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_layer_norm(module: nn.Module) -> bool:
    spec = identify_norm(module)
    return spec is not None and spec.kind == "layer_norm" and isinstance(module.weight, Tensor)
