"""Layer fusion: a transformer encoder layer in one op call, without the Python of its dozen submodules.

The structure of the layer is matched from a trace of one forward, not from its class or the names of its parts. The candidate is
then verified: the fused layer must agree with the layer, with and without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.distance_bias import DistanceBias
from hf_cpu_accel.lazy.lazy_tensor import settled
from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.lazy.window_mask import WindowMask
from hf_cpu_accel.ops.encoder_layer import BoundEncoderLayer, EncoderInputs, bound_encoder_layer
from hf_cpu_accel.patching.accelerated_module import CopiedParameter, copies_of
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.providers.layer import native_everywhere
from hf_cpu_accel.rewrite.attention.masks import batch_padding
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.encoder.call_form import ROTARY
from hf_cpu_accel.rewrite.encoder.parts import (
    BIAS,
    CAUSAL,
    MASK,
    EncoderLayerParts,
    EncoderSignature,
    lengthen_tables,
)
from hf_cpu_accel.runtime.tracing import is_tracing

_NO_TABLES = (None, None)


BOTH_ENDS = (0, -1)  # the first and the last position of a sequence


class FusedEncoderLayer(FusedModuleMixin):
    """Mixed into the layer's own class by `fuse`: the children, hooks and attributes are those of the original.

    So isinstance checks, paths, `state_dict` keys and output capturing still work. A call that asks for more than hidden states,
    a mask and positions (a cache, attention weights, cross-attention) runs the class's own forward, over the same packed
    linears. So does a number of tokens for which other providers compute the linears faster than fusing does.
    """

    _parts: EncoderLayerParts
    _signature: EncoderSignature
    _hooks_inside: tuple[dict[int, Any], ...]
    _bound: BoundEncoderLayer | None
    _skips_padding: bool
    _computed_ends: tuple[int, ...] = ()  # see `padding_readers`: padding there is computed
    _bf16_intermediates: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [B, L, H], attention_mask None, bool or additive [B, 1, 1 or L, L], and its other
        arguments; returns what the original returns."""
        found = self._inputs(hidden_states, args, kwargs)
        if found is None:
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        check_inference(self, hidden_states)
        if not accepts_rows(self, hidden_states.shape[0] * hidden_states.shape[1]):
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        inputs, bias = found
        output = bound_encoder_layer(hidden_states, inputs, self._bound or self._bind())
        return self._signature.returned(output, bias)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        hidden_states, *rest = args or (kwargs.get("hidden_states"),)
        others = {name: value for name, value in kwargs.items() if name != "hidden_states" or args}
        if not isinstance(hidden_states, Tensor):
            return None
        found = self._inputs(hidden_states, tuple(rest), others)
        if found is None or not accepts_rows(self, hidden_states.shape[:-1].numel()):
            return None
        return Reference((hidden_states, *rest), others, tokens=found[0].padding)

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield the tables of distances between tokens."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                yield from copies_of(module, is_packed=True)

    def accepts(self, hidden_states: Tensor, **arguments: Any) -> bool:
        """Return whether the op supports the call."""
        return self._inputs(hidden_states, (), arguments) is not None

    def tokens_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return bool [B, L], the positions that a call with these arguments computes, or None for all."""
        reference = self.reference_call(args, kwargs)
        return None if reference is None else reference.tokens

    def _inputs(
        self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[EncoderInputs, Any] | None:
        """Return the op's inputs and the layer's position bias, or None if the op does not support the call."""
        signature = self._signature
        arguments = kwargs if not args else dict(zip(signature.names, args, strict=False)) | kwargs
        if hidden_states.dim() != 3 or len(args) > len(signature.names):
            return None
        # Hooks see (or change) what passes between the submodules.
        if self.is_watched_within:
            return None
        given = self._read(arguments, hidden_states.shape[1])
        if given is None:
            return None
        mask, bias, tables = given
        padding, window, mask = self._mask_parts(mask, bias, hidden_states)
        relative = self._parts.relative if bias is None else None
        if bias is None and "bias" in (signature.rest or ()):
            if relative is None or torch.compiler.is_compiling():
                return None
            bias = DistanceBias.of(relative, hidden_states.shape[1], hidden_states.dtype)
        elif isinstance(bias, DistanceBias):
            relative = bias.table
        elif bias is not None:
            mask = _with_bias(mask, bias)
        return EncoderInputs(padding, mask, relative, *tables, window), bias

    def _read(self, arguments: dict[str, Any], length: int) -> tuple[Any, Any, tuple[Any, Any]] | None:
        """Return the mask, the position bias and the rotary tables of a call, or None if the op does not support it."""
        signature, mask, bias = self._signature, None, None
        tables: tuple[Tensor | None, Tensor | None] = _NO_TABLES
        causal = signature.causal
        if causal and arguments.get(CAUSAL) is False:
            return None
        for name, value in arguments.items():
            # Callers pass None and False for unused options.
            if value is None or value is False or name in signature.ignored:
                continue
            value = settled(value)
            if name == MASK and name in signature.names and self._knows_mask(value):
                mask = value
            elif name == BIAS and name in signature.names and _is_bias(value):
                bias = value
            elif name == ROTARY and signature.rotates and _are_tables(value):
                given = self._tables_for(value, length)
                if given is None:
                    return None
                tables = given
            elif name == CAUSAL:
                causal = True
            else:
                return None
        if signature.rotates and tables is _NO_TABLES:
            return None
        if causal and mask is None:  # a mask includes causality
            if not (signature.causal or signature.told_causal):
                return None
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return mask, bias, tables

    def _tables_for(self, value: Any, length: int) -> tuple[Tensor, Tensor] | None:
        """Return the rotary tables [1 or B, length, rotated features] of a call, or None if they are for other positions."""
        cos, sin = (table if table.dim() == 3 else table[None] for table in value)
        if self._signature.prefix_tokens:
            cos, sin = lengthen_tables((cos, sin), length)
        return (cos, sin) if cos.shape[1] == sin.shape[1] == length else None

    def _mask_parts(
        self, mask: Any, bias: Any, hidden_states: Tensor
    ) -> tuple[Tensor | None, int, Tensor | None]:
        """Return the tokens (bool [B, L] or None), the window (0 without one), and the remaining mask for the op."""
        around = self._window_of(mask, bias)
        if around is not None:
            return around.padding, around.window, None
        if mask is None:
            return None, 0, None
        padding = batch_padding(mask) if self._skips_padding else None
        if padding is not None and self._skips(padding):
            return padding, 0, None
        return None, 0, _broadcastable(mask, hidden_states)

    def _window_of(self, mask: Any, bias: Any) -> WindowMask | None:
        """Return `mask` if the op can compute it from the window, or None."""
        if not isinstance(mask, WindowMask) or bias is not None or self._parts.relative is not None:
            return None
        return mask if self._skips(mask.padding) else None

    def _skips(self, padding: Tensor | None) -> bool:
        """Return whether no code reads the skipped positions; bool [B, L] are the tokens."""
        if padding is None or not self._skips_padding:
            return padding is None
        if self._computed_ends and is_tracing():
            return False  # a graph is for all batches
        ends = list(self._computed_ends)
        return not ends or remember(padding, ("tokens at", *ends), lambda: bool(padding[:, ends].all()))

    def _knows_mask(self, mask: Any) -> bool:
        """Return whether the value is a bool or additive mask that the layer accepts."""
        if not isinstance(mask, Tensor):
            return False
        return self._signature.boolean_masks if mask.dtype is torch.bool else mask.is_floating_point()

    def _bind(self) -> BoundEncoderLayer:
        self._bound = self._parts.weights(bf16_intermediates=self._bf16_intermediates).bind()
        return self._bound

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedEncoderLayer:
        super()._apply(fn, recurse)
        self._bound = None  # holds a copy of the biases
        return self


def accepts_rows(layer: FusedEncoderLayer, rows: int) -> bool:
    """Return whether no other provider computes the linears of so many rows faster than fusing does."""
    return native_everywhere(layer._parts.linears, rows)


def fuse(
    layer: nn.Module,
    parts: EncoderLayerParts,
    signature: EncoderSignature,
    *,
    skips_padding: bool,
    bf16_intermediates: bool = True,
    fused_class: type[FusedEncoderLayer] = FusedEncoderLayer,
) -> FusedEncoderLayer:
    """Return `layer` with the forward of `fused_class`; the original is not changed."""
    fused: FusedEncoderLayer = fused_layer(
        fused_class,
        layer,
        _parts=parts,
        _signature=signature,
        _bound=None,
        _skips_padding=skips_padding,
        _bf16_intermediates=bf16_intermediates,
    )
    return fused


def _broadcastable(mask: Tensor, hidden_states: Tensor) -> Tensor:
    """Return an additive mask in the dtype of the activations, with keys for all positions."""
    if mask.dtype is not torch.bool:
        mask = mask.to(hidden_states.dtype)
    length = hidden_states.shape[1]
    return mask if mask.shape[-1] == length else mask.expand(*mask.shape[:-1], length)


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return one additive mask from both. All layers get the same two, so the result is cached."""
    if mask is None:
        return bias
    lowest = torch.finfo(bias.dtype).min

    def combine() -> Tensor:
        return torch.where(mask, bias, lowest) if mask.dtype is torch.bool else bias + mask

    return remember(mask, "with bias", combine, also=(bias,), by_value=True)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def _are_tables(value: Any) -> bool:
    """Return whether the value is (cos, sin)."""
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(t, Tensor) and t.dim() in (2, 3) for t in value)
        and all(t.dtype in (torch.float32, torch.bfloat16) for t in value)
    )
