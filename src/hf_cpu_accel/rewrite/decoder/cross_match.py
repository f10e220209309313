"""Match the cross-attention in the trace of a decoder layer: projections of an encoder's output, and of the queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.layers import Heads
from hf_cpu_accel.rewrite.decoder.heads import find_heads
from hf_cpu_accel.rewrite.decoder.parts import CrossParts
from hf_cpu_accel.rewrite.decoder.residuals import Branch, differ
from hf_cpu_accel.rewrite.decoder.trace import AttentionCall, DecoderTrace, LinearCall, OpCall
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun


def match_cross_attention(
    layer: nn.Module,
    trace: DecoderTrace,
    paths: Mapping[int, str],
    before: Sequence[OpCall],
    after: Sequence[OpCall],
) -> tuple[CrossParts, Branch] | None:
    """Return the cross-attention, from the calls before its keys were stored and after, or None."""
    encoder, stored, call = trace.encoder, trace.stored[1], trace.attention[1]
    assert encoder is not None
    linears = [c for c in (*before, *after[:1]) if isinstance(c, LinearCall) and c.activation == "none"]
    if len(linears) != 4 or stored.layer_index != trace.stored[0].layer_index:
        return None
    *projections, output = linears
    key, value = (_merging(states, projections) for states in (stored.key, stored.value))
    rest = [c for c in projections if c is not key and c is not value]
    if key is None or value is None or len(rest) != 1:
        return None
    query, kv_heads = rest[0], stored.key.shape[1]
    heads, head_dim = call.query.shape[1], call.query.shape[3]
    found = find_heads(call.query, query.output, kv_heads, layer, (), ())
    group = heads // kv_heads
    plain = Heads(0, group * head_dim if kv_heads > 1 else 0, head_dim if group > 1 else 0)
    if found is None or found.heads != plain or any(differ(c.input, encoder) for c in (key, value)):
        return None
    if call.softcap is not None or call.sinks is not None or call.window is not None:
        return None
    if call.bias is not None and call.bias.any():
        return None
    parts = CrossParts(
        query=LinearRun((paths[id(query.linear)],)),
        key=paths[id(key.linear)],
        value=paths[id(value.linear)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=stored.value.shape[3],
        scale=scale_of(call) * found.factor,
        output=LinearRun((paths[id(output.linear)],)),
    )
    return parts, Branch(query.input, output.output)


def scale_of(call: AttentionCall) -> float:
    """Return the factor of the scores."""
    return call.query.shape[3] ** -0.5 if call.scale is None else call.scale


def _merging(states: Tensor, calls: Sequence[LinearCall]) -> LinearCall | None:
    """Return the call whose output has the heads of `states` [B, heads, L, D], one after another, or None."""
    merged = states.transpose(1, 2).flatten(-2)
    return next((call for call in calls if not differ(call.output, merged)), None)
