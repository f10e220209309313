"""From the trace of a decoder layer to its parts: each step of the layer must follow from the one before by a known formula.

Nothing is told by names. Where several formulas are possible (which norm, which activation, where the residual goes in), the
numbers of the trace decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder_layers import Heads
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.decoder_heads import Found, find_heads
from hf_cpu_accel.rewrite.decoder_residuals import Branch, Norms, differ
from hf_cpu_accel.rewrite.decoder_structure import CrossParts, DecoderParts, LinearRun
from hf_cpu_accel.rewrite.decoder_trace import AttentionCall, DecoderTrace, FFNCall, LinearCall
from hf_cpu_accel.rewrite.packed_linear import PackedLinear
from hf_cpu_accel.rewrite.position_bias import RelativeBias


def read(layer: nn.Module, seen: DecoderTrace, relative: RelativeBias | None) -> DecoderParts | None:
    """The parts of `layer`, whose trace is `seen`, without what only a position shows (rotary tables, windows).

    Args:
        relative: where the layer has the bias of its self-attention from, if that is its own.
    """
    reading = _Reading(layer, seen, relative)
    return reading.parts()


@dataclass(frozen=True)
class _FeedForward:
    """The calls of the FFN, and what went in and came out."""

    up: LinearRun
    gated: bool
    activation: str
    down: LinearRun
    branch: Branch


class _Reading:
    def __init__(self, layer: nn.Module, seen: DecoderTrace, relative: RelativeBias | None) -> None:
        self.layer = layer
        self.seen = seen
        self.relative = relative
        self.paths = {id(module): path for path, module in layer.named_modules()}
        self.norms = Norms(layer)

    def parts(self) -> DecoderParts | None:
        seen = self.seen
        attentions = 1 if seen.encoder is None else 2
        before, middle, after = seen.stages
        if not len(seen.stored) == len(seen.attention) == attentions or not self._covers_all():
            return None
        projections = [call for call in before if isinstance(call, LinearCall)]
        qkv = self._side_by_side([call.linear for call in projections])
        if len(projections) != len(before) or qkv is None or not middle:
            return None
        output, *rest = middle
        entering = self.norms.between(seen.input, projections[0].input)
        if not entering or any(differ(c.input, projections[0].input) for c in projections):
            return None
        if not isinstance(output, LinearCall) or not isinstance(seen.output, Tensor):
            return None
        crossing = None
        if seen.encoder is not None:
            crossing = self._crossing(rest, after)
            if crossing is None:
                return None
            rest = after[1:]
        ffn = self._feed_forward(rest)
        heads = self._heads(projections)
        if ffn is None or heads is None:
            return None
        attention = Branch(projections[0].input, output.output)
        if crossing is None:
            found = self.norms.residuals(seen.input, attention, ffn.branch, seen.output)
        else:
            found = self.norms.crossing_residuals(seen.input, attention, crossing[1], ffn.branch, seen.output)
        residuals = next(found, None)
        if residuals is None:
            return None
        query, key, value = heads
        call, stored = seen.attention[0], seen.stored[0]
        return DecoderParts(
            qkv=qkv,
            heads=call.query.shape[1],
            kv_heads=stored.key.shape[1],
            head_dim=stored.key.shape[3],
            value_dim=stored.value.shape[3],
            query=query.heads,
            key=key.heads,
            value=value.heads,
            scale=_scale(call) * query.factor,
            softcap=call.softcap,
            sinks=self._path_of(call.sinks),
            relative=self.relative,
            output=self._alone(output),
            up=ffn.up,
            gated=ffn.gated,
            activation=ffn.activation,
            down=ffn.down,
            query_norm=query.norm,
            key_norm=key.norm,
            attention_norm=entering[0],
            ffn_norm=residuals.ffn_norm,
            attention_post_norm=residuals.attention_post_norm,
            ffn_post_norm=residuals.ffn_post_norm,
            attention_out_norm=residuals.attention_out_norm,
            ffn_out_norm=residuals.ffn_out_norm,
            parallel=residuals.parallel,
            residual_scale=residuals.scale,
            cross=None if crossing is None else crossing[0],
            cross_norm=residuals.cross_norm,
            cross_out_norm=residuals.cross_out_norm,
        )

    def _covers_all(self) -> bool:
        """Whether every packed linear was called once, and each parameter is part of one, of a norm, the sinks or the bias."""
        called = [
            linear
            for stage in self.seen.stages
            for call in stage
            for linear in ((call.linear,) if isinstance(call, LinearCall) else (call.up, call.down))
        ]
        linears = [module for module in self.layer.modules() if isinstance(module, PackedLinear)]
        if sorted(map(id, called)) != sorted(map(id, linears)):
            return False
        known = [module for _, module in self.norms.all] + linears
        theirs = {id(p) for module in known for p in module.parameters(recurse=False)}
        theirs |= {id(call.sinks) for call in self.seen.attention if call.sinks is not None}
        if self.relative is not None:
            theirs.add(id(self.layer.get_parameter(self.relative.path)))
        return all(id(p) in theirs for p in self.layer.parameters())

    def _path_of(self, parameter: Tensor | None) -> str | None:
        return next((path for path, p in self.layer.named_parameters() if p is parameter), None)

    def _alone(self, call: LinearCall) -> LinearRun:
        return LinearRun((self.paths[id(call.linear)],))

    def _side_by_side(self, linears: Sequence[PackedLinear]) -> LinearRun | None:
        """The linears as a run, in the order in which they lie, if they fill one."""
        linears = sorted(linears, key=lambda linear: linear.index)
        indices = [linear.index for linear in linears]
        if not linears or indices != list(range(indices[0], indices[0] + len(indices))):
            return None
        if any(linear.group is not linears[0].group for linear in linears):
            return None
        return LinearRun(tuple(self.paths[id(linear)] for linear in linears))

    def _heads(self, projections: Sequence[LinearCall]) -> tuple[Found, Found, Found] | None:
        stored = self.seen.stored[0]
        raw = torch.cat([c.output for c in sorted(projections, key=lambda c: c.linear.index)], dim=-1)
        kv_heads, norms = stored.key.shape[1], self.norms.all
        query = find_heads(self.seen.attention[0].query, raw, kv_heads, norms)
        key = find_heads(stored.key, raw, kv_heads, norms)
        value = find_heads(stored.value, raw, kv_heads, ())
        if query is None or key is None or value is None or key.factor != 1 or value.factor != 1:
            return None
        return query, key, value

    def _crossing(
        self, before: Sequence[LinearCall | FFNCall], after: Sequence[LinearCall | FFNCall]
    ) -> tuple[CrossParts, Branch] | None:
        """The cross-attention, from what was called until its keys were stored, and after that."""
        encoder, stored, call = self.seen.encoder, self.seen.stored[1], self.seen.attention[1]
        assert encoder is not None
        linears = [c for c in (*before, *after[:1]) if isinstance(c, LinearCall) and c.activation == "none"]
        if len(linears) != 4 or stored.layer_index != self.seen.stored[0].layer_index:
            return None
        *projections, output = linears
        key, value = (_merging(states, projections) for states in (stored.key, stored.value))
        rest = [c for c in projections if c is not key and c is not value]
        if key is None or value is None or len(rest) != 1:
            return None
        query, kv_heads = rest[0], stored.key.shape[1]
        heads, head_dim = call.query.shape[1], call.query.shape[3]
        found = find_heads(call.query, query.output, kv_heads, ())
        plain = Heads(0, heads // kv_heads * head_dim if kv_heads > 1 else 0)
        if found is None or found.heads != plain or any(differ(c.input, encoder) for c in (key, value)):
            return None
        if call.softcap is not None or call.sinks is not None or call.window is not None:
            return None
        if call.bias is not None and call.bias.any():
            return None
        parts = CrossParts(
            query=self._alone(query),
            key=self.paths[id(key.linear)],
            value=self.paths[id(value.linear)],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=stored.value.shape[3],
            scale=_scale(call) * found.factor,
            output=self._alone(output),
        )
        return parts, Branch(query.input, output.output)

    def _feed_forward(self, calls: Sequence[LinearCall | FFNCall]) -> _FeedForward | None:
        if len(calls) == 1 and isinstance(calls[0], FFNCall):
            call = calls[0]
            up, down = (LinearRun((self.paths[id(linear)],)) for linear in (call.up, call.down))
            return _FeedForward(up, False, call.activation, down, Branch(call.input, call.output))
        linears = [call for call in calls if isinstance(call, LinearCall)]
        if len(linears) != len(calls) or len(linears) not in (2, 3):
            return None
        *ups, down_call = linears
        run = self._side_by_side([call.linear for call in ups])
        if run is None or any(differ(call.input, ups[0].input) for call in ups):
            return None
        ups.sort(key=lambda call: call.linear.index)
        raw = torch.cat([call.output for call in ups], dim=-1)
        fused = {call.activation for call in ups}
        if fused != {"none"}:
            kind = (False, fused.pop()) if len(ups) == 1 and not differ(raw, down_call.input) else None
        else:
            kind = _activation(raw, down_call.input)
        if kind is None:
            return None
        return _FeedForward(run, *kind, self._alone(down_call), Branch(ups[0].input, down_call.output))


def _scale(call: AttentionCall) -> float:
    return call.query.shape[3] ** -0.5 if call.scale is None else call.scale


def _merging(states: Tensor, calls: Sequence[LinearCall]) -> LinearCall | None:
    """The call that gave the heads of `states` [B, heads, L, D], one after another."""
    merged = states.transpose(1, 2).flatten(-2)
    return next((call for call in calls if not differ(call.output, merged)), None)


def _activation(raw: Tensor, hidden: Tensor) -> tuple[bool, str] | None:
    """(gated, activation) that make the FFN's `hidden` of what comes out of its first linears."""
    gated = raw.shape[-1] == 2 * hidden.shape[-1]
    gate, up = raw.chunk(2, dim=-1) if gated else (raw, None)
    for name, function in ACTIVATIONS.items():
        made = function(gate) if up is None else function(gate) * up
        if not differ(made, hidden):
            return gated, name
    return None
