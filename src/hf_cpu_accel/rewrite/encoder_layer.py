"""Level two: a whole transformer encoder layer in one op call, without the Python of its dozen submodules in between.

What the layer is made of is read off a trace of one forward, not off its class or the names of its parts. The guess is then proved:
the fused layer must give what the layer gave, with and without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.encoder_layer import EncoderWeights, NormWeights
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.layer import own_everywhere
from hf_cpu_accel.rewrite.attention_interface import padding_of
from hf_cpu_accel.rewrite.changes import swap_module
from hf_cpu_accel.rewrite.context import Context
from hf_cpu_accel.rewrite.hooks import forward_hooks, has_foreign_hook
from hf_cpu_accel.rewrite.layer_trace import AttentionCall, LayerTrace
from hf_cpu_accel.rewrite.mixed_class import Mixed, fused_layer
from hf_cpu_accel.rewrite.norm import NormSpec, identify_norm
from hf_cpu_accel.rewrite.packed_linear import PackedLinear, check_inference
from hf_cpu_accel.rewrite.projection_group import members_apart
from hf_cpu_accel.rewrite.verify import probe, row_error

STRUCTURE = "encoder layer"

_ENCODER_LAYER = torch.ops.hf_cpu_accel.encoder_layer.default

# How far a fused layer may be from the layer, by dtype of the activations. Both use the same packed weights, so what is left is the
# rounding of what passes between the ops; a wrong reading (no activation, say) may hide below the bounds of quantisation.
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class EncoderLayerParts:
    """The parts of one layer, all of them modules in it.

    Attributes:
        attention: how attention was called, and on what; query, key and value lie side by side in one projection group.
        pre_norm: whether the norms come before attention and FFN, or after the residuals are added.
        returns_tuple: whether the layer's forward gives (hidden_states,) instead of hidden_states.
    """

    attention: AttentionCall
    output: PackedLinear
    attention_norm: tuple[nn.Module, NormSpec]
    up: PackedLinear
    down: PackedLinear
    ffn_norm: tuple[nn.Module, NormSpec]
    activation: str
    pre_norm: bool
    returns_tuple: bool

    @cached_property
    def linears(self) -> tuple[PackedLinear, ...]:
        """In the order in which they are called."""
        call = self.attention
        return (call.query, call.key, call.value, self.output, self.up, self.down)

    def weights(self, *, narrow: bool) -> EncoderWeights:
        """The packed weights of the three projections side by side, and all others; see `EncoderWeights` for `narrow`."""
        call, group = self.attention, self.attention.query.group
        indices = (call.query.index, call.key.index, call.value.index)
        first, last = min(indices), max(indices)
        qkv, qkv_bias = group.weight(first, last)
        return EncoderWeights(
            qkv=qkv,
            qkv_bias=qkv_bias,
            order=(indices[0] - first, indices[1] - first, indices[2] - first),
            head_size=call.head_size,
            attention_scale=call.scale,
            output=self.output.packed,
            output_bias=self.output.bias,
            attention_norm=_norm_weights(self.attention_norm),
            up=self.up.packed,
            up_bias=self.up.bias,
            down=self.down.packed,
            down_bias=self.down.bias,
            activation=self.activation,
            ffn_norm=_norm_weights(self.ffn_norm),
            norm_before=self.pre_norm,
            narrow=narrow and qkv.dtype != "float32",
        )


class FusedEncoderLayer(Mixed):
    """Mixed into the layer's own class by `fuse`: the children, hooks and attributes are those of the original.

    So isinstance checks, paths, `state_dict` keys and output capturing work as before. A call that asks for more than hidden states
    and a mask (a cache, attention weights, cross-attention) takes the class's own forward, over the same packed linears. So does a
    number of tokens for which other providers than our kernels make the linears faster than fusing them does.
    """

    _parts: EncoderLayerParts
    _hooks_inside: tuple[dict[int, Any], ...]
    _bound: tuple[Any, ...] | None
    _skips_padding: bool
    _narrow: bool

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """hidden_states [B, L, H], attention_mask None, bool or additive [B, 1, 1 or L, L] -> as the original."""
        unusual = hidden_states.dim() != 3 or _asks_for_more(args, kwargs) or _is_odd(attention_mask)
        # Somebody wants to see (or change) what passes between the submodules.
        if unusual or (any(self._hooks_inside) and any(map(has_foreign_hook, self._hooks_inside))):
            return self._original_class.forward(self, hidden_states, attention_mask, *args, **kwargs)
        check_inference(self, hidden_states)
        if not own_everywhere(self._parts.linears, hidden_states.shape[0] * hidden_states.shape[1]):
            return self._original_class.forward(self, hidden_states, attention_mask, *args, **kwargs)
        padding, mask = None, attention_mask
        if mask is not None:
            padding = padding_of(mask) if self._skips_padding else None
            mask = None if padding is not None else _broadcastable(mask, hidden_states)
        output = _ENCODER_LAYER(
            hidden_states, padding, mask, None, None, None, *(self._bound or self._bind())
        )
        return (output,) if self._parts.returns_tuple else output

    def _bind(self) -> tuple[Any, ...]:
        """The weights as the op takes them, looked up once: for short sequences that costs as much as the op."""
        self._bound = self._parts.weights(narrow=self._narrow).arguments()
        return self._bound

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedEncoderLayer:
        super()._apply(fn, recurse)
        self._bound = None  # holds a copy of the biases
        return self


def fuse_encoder_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that is one. To be called when the linears are packed and attention is ours."""
    items: list[PlanItem] = []
    inside: set[int] = set()  # modules of a layer that is fused already
    for path, layer in list(context.root.named_modules()):
        if (
            id(layer) in inside
            or not context.slots[id(layer)]
            or any(context.skipped(f"{path}.{name}" if name else path) for name, _ in layer.named_modules())
            or not _may_be_layer(layer)
        ):
            continue
        parts = _parts_of(layer)
        if parts is None:
            continue
        inside.update(id(module) for module in layer.modules())
        fused = fuse(layer, parts, skips_padding=context.config.padding == "skip")
        swap_module(context.journal, context.slots[id(layer)], fused)
        items.append(PlanItem(path, STRUCTURE, "encoder_layer", context.dtype, 0, reason=None))
    return items


def fuse(
    layer: nn.Module, parts: EncoderLayerParts, *, skips_padding: bool, narrow: bool = True
) -> nn.Module:
    """`layer` with the fused forward; the original is not changed."""
    fused: nn.Module = fused_layer(
        FusedEncoderLayer, layer, _parts=parts, _bound=None, _skips_padding=skips_padding, _narrow=narrow
    )
    return fused


def _may_be_layer(module: nn.Module) -> bool:
    """Six packed linears, two norms, and no parameters besides theirs."""
    if (
        isinstance(module, FusedEncoderLayer)
        or "forward" in vars(module)
        or module._compiled_call_impl is not None
    ):
        return False
    names = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if names[:2] != ["hidden_states", "attention_mask"]:
        return False
    inside = [child for child in module.modules() if child is not module]
    if any("forward" in vars(child) for child in inside) or any(
        has_foreign_hook(hooks) for child in inside for hooks in forward_hooks(child)
    ):
        return False
    linears = [child for child in module.modules() if isinstance(child, PackedLinear)]
    if len(linears) != 6:
        return False
    norms = [child for child in module.modules() if identify_norm(child) is not None]
    theirs = {id(p) for part in (*linears, *norms) for p in part.parameters(recurse=False)}
    return (
        len(norms) == 2
        and all(id(p) in theirs for p in module.parameters())
        and not any(True for _ in module.buffers())
    )


def _parts_of(layer: nn.Module) -> EncoderLayerParts | None:
    """The reading of a trace of `layer` that computes what it computes, or None."""
    width = next(child.in_features for child in layer.modules() if isinstance(child, PackedLinear))
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    hidden_states = probe(width, dtype)
    batch, length = hidden_states.shape[:2]
    trace = LayerTrace(layer)
    padding = torch.ones(batch, length, dtype=torch.bool)
    padding[-1, length - 1 :] = False
    masks = (None, padding[:, None, None, :].expand(batch, 1, length, length))
    best, best_error = None, _TOLERANCES[dtype]
    with torch.no_grad(), members_apart():
        try:
            with trace:
                output = layer(hidden_states, None)
            candidates = _candidates(trace, output)
            expected = [_hidden_states(layer(hidden_states, mask)) for mask in masks] if candidates else []
        except Exception:  # unknown code: whatever it raises, it does not take (hidden_states, mask)
            return None
        for parts in candidates:
            fused = fuse(layer, parts, skips_padding=False, narrow=False)
            given = [_hidden_states(fused(hidden_states, mask)) for mask in masks]
            error = max(row_error(ours, theirs) for ours, theirs in zip(given, expected, strict=True))
            if error <= best_error:
                best, best_error = parts, error
    return best


def _candidates(trace: LayerTrace, output: Any) -> list[EncoderLayerParts]:
    """What a layer with this trace may be: where its norms are, and which of its activations is in the FFN."""
    if isinstance(output, tuple) and len(output) != 1:
        return []
    call = trace.attention[0] if len(trace.attention) == 1 else None
    if call is None or len(trace.linears) != 6 or len(trace.norms) != 2 or not _adjacent(call):
        return []
    specs = [identify_norm(norm) for norm in trace.norms]
    if {call.query, call.key, call.value} != set(trace.linears[:3]) or specs[0] is None or specs[1] is None:
        return []
    return [
        EncoderLayerParts(
            attention=call,
            output=trace.linears[3],
            attention_norm=(trace.norms[0], specs[0]),
            up=trace.linears[4],
            down=trace.linears[5],
            ffn_norm=(trace.norms[1], specs[1]),
            activation=activation,
            pre_norm=pre_norm,
            returns_tuple=isinstance(output, tuple),
        )
        for activation in trace.activations
        for pre_norm in (False, True)
    ]


def _adjacent(call: AttentionCall) -> bool:
    """Query, key and value lie side by side in one packed weight, in any order, and are equally wide."""
    parts = (call.query, call.key, call.value)
    indices = sorted(part.index for part in parts)
    one_group = call.query.group is call.key.group is call.value.group
    return one_group and indices[2] - indices[0] == 2 and len({part.out_features for part in parts}) == 1


def _norm_weights(part: tuple[nn.Module, NormSpec]) -> NormWeights:
    module, spec = part
    scale = spec.scale(module.get_parameter("weight"))
    return NormWeights(scale, module._parameters.get("bias"), spec.eps)


def _broadcastable(mask: Tensor, hidden_states: Tensor) -> Tensor:
    """An additive mask in the type of the activations, any mask with keys for all positions."""
    if mask.dtype is not torch.bool:
        mask = mask.to(hidden_states.dtype)
    length = hidden_states.shape[1]
    return mask if mask.shape[-1] == length else mask.expand(*mask.shape[:-1], length)


def _hidden_states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _is_odd(mask: Any) -> bool:
    """Neither None nor a mask of truth values or of numbers to add."""
    return mask is not None and not (
        isinstance(mask, Tensor) and (mask.dtype is torch.bool or mask.is_floating_point())
    )


def _asks_for_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """None and False are what callers pass for what they do not want."""
    return any(value is not None and value is not False for value in (*args, *kwargs.values()))
