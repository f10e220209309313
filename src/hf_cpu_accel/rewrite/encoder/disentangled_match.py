"""Match an encoder layer with disentangled attention from its products, and verify it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.hosts.arguments import parameter_names
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.trace import BMM, traced
from hf_cpu_accel.rewrite.encoder.candidates import candidates, unexplained
from hf_cpu_accel.rewrite.encoder.match import EncoderMatch, Fuse, hidden_states_of
from hf_cpu_accel.rewrite.encoder.parts import MASK, EncoderLayerParts, EncoderSignature
from hf_cpu_accel.rewrite.encoder.positions import RELATIVE, VECTORS, DisentangledParts
from hf_cpu_accel.rewrite.encoder.trace import LayerTrace
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.tolerance import ENCODER_LAYER, MEASURED_SCALE

_SPAN = "pos_ebd_size"  # attribute of attention modules
_BATCH, _LENGTH = 2, 7
_OTHER = "its attention is not disentangled attention as in DeBERTa"


def match_disentangled(layer: nn.Module, fuse: Fuse) -> EncoderMatch | Refusal:
    """Return the parts and the signature of `layer`, if `fuse` of these agrees with it.

    Raises:
        Refused: the layer rejects its arguments, or has other operations.
    """
    shadow = Shadow(layer)
    with torch.no_grad(), shadow.running():
        parts, signature = _Matcher(shadow.module, fuse).match()
    return parts.moved(shadow.original, None), signature


class _Matcher:
    def __init__(self, layer: nn.Module, fuse: Fuse) -> None:
        modules = list(layer.modules())
        self.layer, self.fuse = layer, fuse
        span = next((vars(m)[_SPAN] for m in modules if isinstance(vars(m).get(_SPAN), int)), 0)
        if span < 1:
            raise Refused(Refusal(_OTHER))
        self.span = span
        width = next(m.in_features for m in modules if isinstance(m, PackedLinear))
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.hidden_states = random(_BATCH, _LENGTH, width)
        self.vectors = random(2 * span, width)

    def match(self) -> tuple[DisentangledParts, EncoderSignature]:
        """Return the parts and the signature.

        Raises:
            Refused: see `match_disentangled`.
        """
        trace = _Trace(self.layer)
        with trace:
            output = self._call(self.layer, self._mask())
        signature = EncoderSignature(parameter_names(self.layer.forward)[1:], rest=_rest(output))
        possible = list(self._possible(trace))
        if not possible:
            raise Refused(Refusal(_OTHER))
        unknown = unexplained(self.layer, possible[0])
        if unknown is not None:
            raise Refused(Refusal(f"its parameter {unknown} belongs to neither a linear nor a norm"))
        masks = [self._mask(), self._mask(padded=True)]
        expected = [hidden_states_of(self._call(self.layer, mask)) for mask in masks]
        errors = [self._error(parts, signature, masks, expected) for parts in possible]
        best = min(range(len(errors)), key=errors.__getitem__)
        if errors[best] > ENCODER_LAYER.of(self.hidden_states.dtype):
            raise Refused(Refusal("its output does not match its linears, norms and attention"))
        return possible[best], signature

    def _call(self, layer: nn.Module, mask: Tensor) -> Any:
        return required(call_foreign(layer, self.hidden_states, **self._arguments(mask)))

    def _arguments(self, mask: Tensor) -> dict[str, Any]:
        return {MASK: mask, RELATIVE: self._relative(), VECTORS: self.vectors}

    def _relative(self) -> Tensor:
        """Return small distances, the largest with embeddings of their own, and larger ones, in both directions; [1, L, L]."""
        span = self.span
        ahead = torch.tensor([0, 1, span // 2, span - 1, span, span + 3, 1])
        position = torch.arange(_LENGTH)
        distance = position[:, None] - position
        return (ahead[distance.abs()] * distance.sign())[None]

    def _mask(self, *, padded: bool = False) -> Tensor:
        tokens = torch.ones(_BATCH, 1, _LENGTH, dtype=torch.int64)
        if padded:
            tokens[-1, :, -2:] = 0
        return (tokens[..., None] * tokens[:, :, None]).contiguous()

    def _possible(self, trace: _Trace) -> Iterator[DisentangledParts]:
        found = trace.positions()
        if found is None:
            return
        key, query = found
        for parts in candidates(self.layer, trace):
            given = {name: getattr(parts, name) for name in EncoderLayerParts.__dataclass_fields__}
            parts_scale = {**given, "scale": _exact(parts.scale, parts.attention.head_size)}
            yield DisentangledParts(**parts_scale, position_key=key, position_query=query, span=self.span)

    def _error(
        self,
        parts: DisentangledParts,
        signature: EncoderSignature,
        masks: list[Tensor],
        expected: list[Tensor],
    ) -> float:
        fused = self.fuse(self.layer, parts, signature)
        if not all(fused.accepts(self.hidden_states, **self._arguments(mask)) for mask in masks):
            return float("inf")
        given = [hidden_states_of(self._call(fused, mask)) for mask in masks]
        return row_error(given, expected)


@dataclass
class _Trace(LayerTrace):
    """One forward of a layer over hidden states and position embeddings.

    Attributes:
        products: the operands of each batched matrix product, [B * heads, rows, features] both.
    """

    products: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _of_positions: list[tuple[PackedLinear, Tensor]] = field(default_factory=list)
    _functions: AbstractContextManager[None] | None = None

    def __enter__(self) -> _Trace:
        self._functions = traced(functions=dict.fromkeys(BMM, self._product))
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._functions is not None
        self._functions.__exit__(*error)

    def linear_called(self, linear: PackedLinear, output: Tensor | None) -> None:
        if output is not None and output.numel() != _BATCH * _LENGTH * linear.out_features:
            self._of_positions.append((linear, output))
        else:
            super().linear_called(linear, output)

    def _product(self, args: Any, kwargs: Any, output: Any) -> None:
        self.products.append((args[0], args[1].mT))

    def positions(self) -> tuple[PackedLinear | None, PackedLinear | None] | None:
        """Return the linears for keys and queries of positions, or None; records the attention of content."""
        if len(self.products) < 3:
            return None
        (query, key), *others, (_, value) = self.products
        if any(side.shape[0] % _BATCH for pair in self.products for side in pair):
            return None
        self.attention.clear()  # products of positions look like those of attention written out
        self.attended(_heads(query), _heads(key), _heads(value.mT), None, 1.0)
        call = self.attention[0]
        found: dict[str, PackedLinear] = {}
        for content, vectors in others:
            side = self._made_of(_heads(content))
            linear = self._made_of_positions(_heads(vectors)[:1])
            name = {} if call is None else {call.query.linear: "key", call.key.linear: "query"}
            role = None if side is None else name.get(side.linear)
            if linear is None or role is None or role in found:
                return None
            found[role] = linear
        return found.get("key"), found.get("query")

    def _made_of_positions(self, heads: Tensor) -> PackedLinear | None:
        rows = heads.transpose(1, 2).flatten(2)
        for linear, output in self._of_positions:
            if output.shape == rows.shape and torch.equal(output, rows):
                return linear
        return None


def _heads(x: Tensor) -> Tensor:
    """Return [B * heads, rows, features] as [B, heads, rows, features]."""
    return x.unflatten(0, (_BATCH, -1))


def _rest(output: Any) -> tuple[None, ...] | None:
    """Return the outputs after the hidden states.

    Raises:
        Refused: only the layer itself can compute them.
    """
    if not isinstance(output, tuple):
        return None
    if any(value is not None for value in output[1:]):
        raise Refused(Refusal("it returns more than hidden states"))
    return (None,) * (len(output) - 1)


def _exact(scale: float, head_size: int) -> float:
    """Return 1 / sqrt(n * head_size) for a sum of n products if the measured `scale` is close to it, else `scale`."""
    exact = [(count * head_size) ** -0.5 for count in (1, 2, 3)]
    nearest = min(exact, key=lambda value: abs(value - scale))
    return nearest if abs(nearest - scale) < MEASURED_SCALE * nearest else scale
