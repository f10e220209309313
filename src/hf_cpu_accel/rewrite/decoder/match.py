"""Match the trace of a decoder layer to its parts: each step of the layer must follow from the one before by a known formula.

Names decide nothing. If several formulas are possible (which norm, which activation, where the residual is added), the values of
the trace decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, takewhile

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.layers import Heads
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.decoder.cross_match import match_cross_attention, scale_of
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts, MixtureParts
from hf_cpu_accel.rewrite.decoder.ffn_match import Ending, FeedForwardMatcher, endings
from hf_cpu_accel.rewrite.decoder.head_norms import find_head_norms
from hf_cpu_accel.rewrite.decoder.heads import Finish, Found, find_finish, find_heads, repeats_of
from hf_cpu_accel.rewrite.decoder.parts import DecoderParts
from hf_cpu_accel.rewrite.decoder.relative_bias import RelativeBias
from hf_cpu_accel.rewrite.decoder.residuals import Branch, Norms, Residuals, differ
from hf_cpu_accel.rewrite.decoder.scores import Scores, read_scores
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace, FFNCall, LinearCall, Stored
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun, side_by_side

OTHER = "it has operations that the fused layer does not support: its parts run separately"


def match_layer(
    layer: nn.Module, trace: DecoderTrace, relative: RelativeBias | None, dtype: torch.dtype
) -> DecoderParts | Refusal:
    """Return the parts of `layer`, whose trace is `trace`, without those that only positions show (rotary tables, windows), or a
    refusal.

    Args:
        relative: the source of the layer's own position bias, if it has one.
        dtype: dtype in which the host computed the arguments of the layer.
    """
    matcher = _Matcher(layer, trace, relative, dtype)
    return matcher.parts() or Refusal(matcher.reason, yields=matcher.is_other_kind)


class _Matcher:
    def __init__(
        self, layer: nn.Module, trace: DecoderTrace, relative: RelativeBias | None, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.reason, self.is_other_kind = OTHER, False
        self.layer = layer
        self.trace = trace
        self.relative = relative
        self.paths = {id(module): path for path, module in layer.named_modules()}
        self.norms = Norms(layer, trace.input.shape[-1])
        self.head_norms = list(find_head_norms(layer))
        self.repeats, self.stored = 1, trace.stored[:1]
        for stored in self.stored:
            self.repeats = math.gcd(repeats_of(stored.key), repeats_of(stored.value))
            key, value = stored.key[:, :: self.repeats], stored.value[:, :: self.repeats]
            self.stored = [Stored(key, value, stored.layer_index)]

    def parts(self) -> DecoderParts | None:
        trace = self.trace
        attentions = 1 if trace.encoder is None else 2
        before, middle, after = trace.stages
        if not len(trace.stored) == len(trace.attention) == attentions:
            self.is_other_kind = True  # for example an encoder layer that can also be a decoder layer
            return self._left(
                f"it calls attention {len(trace.attention)} times and updates the cache {len(trace.stored)} times, "
                f"expected {attentions}"
            )
        if trace.clips:
            return self._left("it clamps the outputs of its projections")
        if not self._covers_all():
            return None
        projections = self._projections()
        qkv = side_by_side([call.linear for call in projections], self.paths)
        if len(projections) < len(before) or qkv is None or not middle:
            return self._left("its query, key and value projections are not packed side by side")
        output, *rest = middle[len(projections) - len(before) :]
        entering = self.norms.between(trace.input, projections[0].input)
        if not entering or any(differ(c.input, projections[0].input) for c in projections):
            return self._left("its projections do not read hidden_states or a norm of them")
        if not isinstance(output, LinearCall) or not isinstance(trace.output, Tensor):
            return None
        crossing = None
        if trace.encoder is not None:
            crossing = match_cross_attention(self.layer, trace, self.paths, rest, after)
            if crossing is None:
                return self._left("its cross-attention is not supported")
            rest = after[1:]
        raw = torch.cat([c.output for c in sorted(projections, key=lambda c: c.linear.index)], dim=-1)
        heads = self._heads(raw)
        if heads is None:
            return self._left("its cached keys and values are not its projections, optionally normalized")
        finish = self._finish(raw, output)
        if finish is None:
            return self._left(
                "its output projection does not read the output of attention, optionally with a norm and a gate"
            )
        attention = Branch(projections[0].input, output.output)
        cross = None if crossing is None else crossing[1]
        buffers = dict(self.layer.named_buffers())
        matcher = FeedForwardMatcher(self.paths, self.norms, self._unknown(), buffers)
        ways = (
            (ending, *way)
            for ending in endings(self.layer, trace, rest, self.norms, self.paths)
            for way in self._ways(matcher, ending, attention, cross)
        )
        ending, ffn, residuals = next(ways, (None, None, None))
        self.reason = matcher.reason or self.reason
        if ending is None or residuals is None or not self._knows_all(ffn):
            return None
        query, key, value = heads
        call, stored = trace.attention[0], self.stored[0]
        scores = (
            read_scores(call, stored.key, self.dtype, buffers.values())
            if call.scores is not None
            else Scores(scale_of(call))
        )
        if scores is None:
            return self._left(
                "its attention scores are not scaled products of queries and keys, optionally with ALiBi"
            )
        return DecoderParts(
            qkv=qkv,
            heads=call.query.shape[1],
            kv_heads=stored.key.shape[1],
            repeats=self.repeats,
            head_dim=stored.key.shape[3],
            value_dim=stored.value.shape[3],
            query=query.heads,
            key=key.heads,
            value=value.heads,
            scale=scores.scale * query.factor,
            alibi=scores.slopes,
            hides=scores.hides,
            window=scores.window,
            softcap=call.softcap,
            sinks=self._path_of(call.sinks),
            relative=self.relative,
            output=LinearRun((self.paths[id(output.linear)],)),
            ffn=ffn,
            query_norm=query.norm,
            key_norm=key.norm,
            value_norm=value.norm,
            shares_keys=trace.takes is not None,
            per_layer=ending.per_layer,
            output_scale=ending.output_scale,
            **vars(finish),
            attention_norm=entering[0],
            cross=None if crossing is None else crossing[0],
            **vars(residuals),
        )

    def _covers_all(self) -> bool:
        """Return whether every packed linear, and all experts, were called once."""
        called: list[nn.Module] = []
        for call in chain.from_iterable(self.trace.stages):
            if isinstance(call, LinearCall):
                called.append(call.linear)
            else:
                called.extend([call.up, call.down] if isinstance(call, FFNCall) else [call.experts])
        packed = [m for m in self.layer.modules() if isinstance(m, PackedLinear | PackedExperts)]
        return sorted(map(id, called)) == sorted(map(id, packed))

    def _knows_all(self, ffn: FeedForwardParts | MixtureParts | None) -> bool:
        """Return whether every parameter belongs to a packed module, a norm, the sinks, the mixture or the position bias."""
        theirs = {id(call.sinks) for call in self.trace.attention if call.sinks is not None}
        if self.relative is not None:
            theirs.add(id(self.layer.get_parameter(self.relative.path)))
        of_mixture = ffn.parameters() if isinstance(ffn, MixtureParts) else set()
        return all(id(p) in theirs or path in of_mixture for path, p in self._unknown().items())

    def _unknown(self) -> dict[str, Tensor]:
        """Return the parameters that belong to neither a packed module nor a norm, by path."""
        known = [module for _, module in self.norms.all]
        known += [module for part in self.head_norms for module in part.modules(self.layer)]
        known += [m for m in self.layer.modules() if isinstance(m, PackedLinear | PackedExperts)]
        theirs = {id(p) for module in known for p in module.parameters(recurse=False)}
        return {path: p for path, p in self.layer.named_parameters() if id(p) not in theirs}

    def _path_of(self, parameter: Tensor | None) -> str | None:
        return next((path for path, p in self.layer.named_parameters() if p is parameter), None)

    def _projections(self) -> list[LinearCall]:
        """Return the linears before attention, and those after it with the same input, such as that of a gate."""
        before, middle, _ = self.trace.stages
        projections = [call for call in before if isinstance(call, LinearCall)]
        late = takewhile(
            lambda call: isinstance(call, LinearCall) and not differ(call.input, projections[0].input), middle
        )
        return projections + [call for call in late if isinstance(call, LinearCall)] if projections else []

    def _heads(self, raw: Tensor) -> tuple[Found, Found, Found] | None:
        stored = self.stored[0]
        kv_heads, norms = stored.key.shape[1], [part for part, _ in self.norms.all]
        query = find_heads(self.trace.attention[0].query, raw, kv_heads, self.layer, norms, self.head_norms)
        if self.trace.takes is not None:
            none = Found(Heads(0, 0), 1, None)
            return None if query is None else (query, none, none)
        key = find_heads(stored.key, raw, kv_heads, self.layer, norms, self.head_norms)
        value = find_heads(stored.value, raw, kv_heads, self.layer, norms, self.head_norms)
        if query is None or key is None or value is None or key.factor != 1 or value.factor != 1:
            return None
        return query, key, value

    def _finish(self, raw: Tensor, output: LinearCall) -> Finish | None:
        context, norms = self.trace.attention[0].output, [part for part, _ in self.norms.all]
        kv_heads = self.stored[0].key.shape[1]
        return find_finish(context, output.input, raw, kv_heads, self.layer, norms, self.head_norms)

    def _ways(
        self, matcher: FeedForwardMatcher, ending: Ending, attention: Branch, cross: Branch | None
    ) -> Iterator[tuple[FeedForwardParts | MixtureParts | None, Residuals]]:
        """Yield the possible parts of the calls between attention and `ending`, with the places of the residual; None without
        calls."""
        x, output, calls = self.trace.input, ending.output, ending.calls
        if not calls and cross is None:
            yield from ((None, way) for way in self.norms.lone_residuals(x, attention, output))
        for ffn in matcher.matches(calls):
            if cross is None:
                ways = self.norms.residuals(x, attention, ffn.branch, output)
            else:
                ways = self.norms.crossing_residuals(x, attention, cross, ffn.branch, output)
            yield from ((ffn.parts, way) for way in ways)

    def _left(self, reason: str) -> DecoderParts | None:
        self.reason = f"{reason}: its parts run separately"
        return None
