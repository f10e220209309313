"""Trace an encoder layer: the packed linears, norms and attention that it calls, and their inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.core.activations import identify, is_library_function
from hf_cpu_accel.rewrite.core.trace import BMM, MATMUL, Listener, traced
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import FusedNorm, identify_norm
from hf_cpu_accel.tolerance import SAME_RATIO, SAME_ZERO, Closeness

_OPS = torch.ops.hf_cpu_accel
_NORMS = (_OPS.layer_norm.default, _OPS.rms_norm.default, torch.ops.aten.native_layer_norm.default)
# Further ops of some layers on scores: hardly visible in small numbers, and not supported by the op.
_BENDS = frozenset(
    {
        torch.tanh,
        Tensor.tanh,
        torch.sigmoid,
        Tensor.sigmoid,
        torch.relu,
        Tensor.relu,
        torch.clamp,
        Tensor.clamp,
    }
    | {nn.functional.relu, nn.functional.sigmoid, nn.functional.tanh, torch.clip, Tensor.clip}
)


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


@dataclass(frozen=True)
class Features:
    """Output features of a linear, from `first` on; their values were multiplied by `factor`."""

    linear: PackedLinear
    first: int
    factor: float = 1.0

    @property
    def offset(self) -> int:
        """Return their first index in the packed weight of the linear's group."""
        return self.linear.range[0] + self.first


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        query, key, value: the features that they come from.
        scale: factor of the scores, None if it is unknown.
        bias: the bias of the scores, [1, heads, L, L], or None.
        causal: whether no token attended to later ones.
    """

    query: Features
    key: Features
    value: Features
    heads: int
    head_size: int
    scale: float | None
    bias: Tensor | None
    causal: bool = False


@dataclass
class LayerTrace:
    """One forward of `layer`, whose linears are packed already, without a mask and with positions that do not rotate.

    Attributes:
        linears: the packed linears in the order of their calls.
        norms: the norms in the order of their calls.
        attention: the attention calls; None for one that does not read linears.
        activations: the activations that the layer may have.
    """

    layer: nn.Module
    linears: list[PackedLinear] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    attention: list[AttentionCall | None] = field(default_factory=list)
    _outputs: list[tuple[PackedLinear, Tensor]] = field(default_factory=list)
    _tracing: AbstractContextManager[None] | None = None

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
        return [name for name in ACTIVATIONS if name in names] or list(ACTIVATIONS)

    def __enter__(self) -> LayerTrace:
        self._tracing = traced(ops=_PackedCalls(self).listeners, functions=_WrittenAttention(self).listeners)
        self._tracing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._tracing is not None
        self._tracing.__exit__(*error)
        self._tracing = None

    def linear_called(self, linear: PackedLinear, output: Tensor | None) -> None:
        self.linears.append(linear)
        if output is not None:
            self._outputs.append((linear, output))

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        scale: float | None,
        causal: bool = False,
    ) -> None:
        """Record attention with query, key, value: [B, heads, L, D]."""
        made = [self._made_of(tensor) for tensor in (query, key, value)]
        made_query, made_key, made_value = made
        if made_query is None or made_key is None or made_value is None or query.shape != key.shape:
            self.attention.append(None)
            return
        heads, head_size = query.shape[1], query.shape[3]
        if scale is not None:
            scale *= made_query.factor * made_key.factor
        alike = made_value.factor == 1.0
        call = AttentionCall(made_query, made_key, made_value, heads, head_size, scale, bias, causal)
        self.attention.append(call if alike else None)

    def masked_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> None:
        """Record attention with a mask, which is either None or the bias of a layer."""
        is_bias = mask is None or (mask.is_floating_point() and mask.dim() == 4 and not causal)
        if query.dim() != 4 or not is_bias:
            self.attention.append(None)
            return
        scale = query.shape[3] ** -0.5 if scale is None else scale
        self.attended(query, key, value, mask, scale, causal)

    def batched(self, heads: Tensor) -> Tensor:
        """Return [B * heads, ...] as [B, heads, ...], with B of the linears' outputs."""
        batch = self._outputs[-1][1].shape[0] if self._outputs else 0
        if heads.dim() != 3 or not batch or heads.shape[0] % batch:
            return heads
        return heads.unflatten(0, (batch, -1))

    def _made_of(self, heads: Tensor) -> Features | None:
        """Return the features of a linear with the values of `heads` [B, heads, L, D], times a factor, or None."""
        if heads.dim() != 4:
            return None
        rows = heads.transpose(1, 2).flatten(2)
        width = rows.shape[2]
        for linear, output in reversed(self._outputs):
            if output.numel() != rows.numel() // width * linear.out_features:
                continue
            output = output.reshape(*rows.shape[:2], -1)
            for first in range(0, linear.out_features - width + 1, width):
                factor = _ratio(rows, output[..., first : first + width])
                if factor is not None:
                    return Features(linear, first, factor)
        return None


class _PackedCalls:
    """Record the ops of this package that a layer calls."""

    def __init__(self, trace: LayerTrace) -> None:
        self.trace = trace
        modules = list(trace.layer.modules())
        self.packed = {m.packed.data.data_ptr(): m for m in modules if isinstance(m, PackedLinear)}
        self.norms = {_scale_of(m).data_ptr(): m for m in modules if identify_norm(m) is not None}
        self.listeners: dict[Any, Listener] = {
            _OPS.linear.default: lambda args, kwargs, output: self._linear(args[1], output),
            _OPS.ffn.default: self._ffn_called,
            _OPS.attention.default: self._attended,
            **dict.fromkeys(_NORMS, self._normalized),
        }

    def _ffn_called(self, args: Any, kwargs: Any, output: Tensor) -> None:
        self._linear(args[1], None)
        self._linear(args[4], output)

    def _attended(self, args: Any, kwargs: Any, output: Tensor) -> None:
        self.trace.masked_attention(*args)

    def _normalized(self, args: Any, kwargs: Any, output: Any) -> None:
        weights = [arg for arg in args[1:] if isinstance(arg, Tensor)]
        norm = self.norms.get(weights[0].data_ptr()) if weights else None
        if norm is not None:
            self.trace.norms.append(norm)

    def _linear(self, weight: Tensor, output: Tensor | None) -> None:
        packed = self.packed.get(weight.data_ptr())
        if packed is not None:
            self.trace.linear_called(packed, None if output is None else output.detach().clone())


class _WrittenAttention:
    """Record attention that is written out: a product of queries and keys, and one of its softmax with values."""

    def __init__(self, trace: LayerTrace) -> None:
        self.trace = trace
        self.scores: tuple[Tensor, Tensor] | None = None
        self.bent = False  # ops between the two products
        self.listeners: dict[Any, Listener] = {
            **dict.fromkeys((*MATMUL, *BMM), self._product),
            nn.functional.scaled_dot_product_attention: self._dispatched,
            **dict.fromkeys(_BENDS, self._bend),
        }

    def _product(self, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) != 2:
            return
        first, second = (self.trace.batched(tensor) for tensor in args)
        if first.dim() != 4 or second.dim() != 4:
            return
        if self.scores is None:
            self.scores = first, second.mT
        elif self.bent:
            self.trace.attention.append(None)
        else:
            self.trace.attended(*self.scores, second, None, None)

    def _dispatched(self, args: Any, kwargs: Any, output: Any) -> None:
        given = dict(zip(_SDPA, args, strict=False)) | kwargs
        call = (given.get(name) for name in ("attn_mask", "is_causal", "scale"))
        self.trace.masked_attention(given["query"], given["key"], given["value"], *call)

    def _bend(self, args: Any, kwargs: Any, output: Any) -> None:
        if self.scores is not None and not self.trace.attention:
            self.bent |= output.shape[-2:] == (self.scores[0].shape[2], self.scores[1].shape[2])


def _ratio(values: Tensor, reference: Tensor) -> float | None:
    """Return the factor between two tensors, or None."""
    if torch.equal(values, reference):
        return 1.0
    close = Closeness(SAME_RATIO.of(values.dtype), SAME_ZERO)
    values, reference = values.double(), reference.double()
    factor = float((values * reference).sum() / (reference * reference).sum())
    return factor if compare(values, factor * reference).within(close) else None


def _scale_of(norm: nn.Module) -> Tensor:
    """Return the weight that the op of a norm gets."""
    if isinstance(norm, FusedNorm) and norm._shifted is not None:
        return norm._shifted
    weight = norm._parameters.get("weight")
    return torch.empty(0) if weight is None else weight
