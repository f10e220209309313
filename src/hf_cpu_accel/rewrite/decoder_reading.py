"""From the trace of a decoder layer to its parts: each step of the layer must follow from the one before by a known formula.

Nothing is told by names. Where several formulas are possible (which norm, which activation, where the residual goes in), the
numbers of the trace decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.rewrite.decoder_heads import Found, find_heads
from hf_cpu_accel.rewrite.decoder_structure import DecoderParts, NormPart
from hf_cpu_accel.rewrite.decoder_trace import DecoderTrace, ExpertsCall, FFNCall, LinearCall, OpCall
from hf_cpu_accel.rewrite.head_norms import find_head_norms
from hf_cpu_accel.rewrite.linear_run import LinearRun
from hf_cpu_accel.rewrite.mixture_reading import read_router
from hf_cpu_accel.rewrite.mixture_structure import FeedForwardParts, MixtureParts
from hf_cpu_accel.rewrite.norm import identify_norm
from hf_cpu_accel.rewrite.packed_experts import PackedExperts
from hf_cpu_accel.rewrite.packed_linear import PackedLinear
from hf_cpu_accel.rewrite.verify import row_error

_TOLERANCE = 1e-4
# A factor this near to 1 is 1, seen through rounding.
_UNITY = 1e-4


def read(layer: nn.Module, seen: DecoderTrace) -> DecoderParts | None:
    """The parts of `layer`, whose trace is `seen`, without what only a position shows (rotary tables, windows)."""
    reading = _Reading(layer, seen)
    return reading.parts()


@dataclass(frozen=True)
class _FeedForward:
    """What the FFN is made of, and what went in and came out."""

    parts: FeedForwardParts | MixtureParts
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _Residuals:
    """How input, attention and FFN become the output."""

    ffn_norm: NormPart | None
    attention_post_norm: NormPart | None
    ffn_post_norm: NormPart | None
    attention_out_norm: NormPart | None
    ffn_out_norm: NormPart | None
    parallel: bool
    scale: float


class _Reading:
    def __init__(self, layer: nn.Module, seen: DecoderTrace) -> None:
        self.layer = layer
        self.seen = seen
        self.paths = {id(module): path for path, module in layer.named_modules()}
        self.norms: list[tuple[NormPart, nn.Module]] = []
        self.head_norms = list(find_head_norms(layer))
        for path, module in layer.named_modules():
            spec = identify_norm(module)
            if spec is not None:
                self.norms.append((NormPart(path, spec), module))

    def parts(self) -> DecoderParts | None:
        seen = self.seen
        if seen.updates != 1 or len(seen.attention) != 1 or seen.key is None or seen.value is None:
            return None
        if not self._covers_all() or len(seen.after) < 2:
            return None
        projections = [call for call in seen.before if isinstance(call, LinearCall)]
        output, *rest = seen.after
        qkv = self._side_by_side([call.linear for call in projections])
        if len(projections) != len(seen.before) or qkv is None or not isinstance(output, LinearCall):
            return None
        entering = self._norms_between(seen.input, projections[0].input)
        if not entering or any(_differ(c.input, projections[0].input) for c in projections):
            return None
        heads = self._heads(projections)
        if heads is None or not isinstance(seen.output, Tensor):
            return None
        ways = ((ffn, way) for ffn in self._halves(rest) for way in self._residuals(output.output, ffn))
        ffn, residuals = next(ways, (None, None))
        if ffn is None or residuals is None or not self._knows_all(ffn.parts):
            return None
        query, key, value = heads
        call = seen.attention[0]
        head_dim = seen.key.shape[3]
        scale = head_dim**-0.5 if call.scale is None else call.scale
        return DecoderParts(
            qkv=qkv,
            heads=call.query.shape[1],
            kv_heads=seen.key.shape[1],
            head_dim=head_dim,
            value_dim=seen.value.shape[3],
            query=query.heads,
            key=key.heads,
            value=value.heads,
            scale=scale * query.factor,
            softcap=call.softcap,
            sinks=self._path_of(call.sinks),
            output=LinearRun((self.paths[id(output.linear)],)),
            ffn=ffn.parts,
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
        )

    def _covers_all(self) -> bool:
        """Whether every packed linear was called once, and so were experts."""
        called: list[nn.Module] = []
        for call in (*self.seen.before, *self.seen.after):
            if isinstance(call, LinearCall):
                called.append(call.linear)
            else:
                called.extend([call.up, call.down] if isinstance(call, FFNCall) else [call.experts])
        packed = [m for m in self.layer.modules() if isinstance(m, PackedLinear | PackedExperts)]
        return sorted(map(id, called)) == sorted(map(id, packed))

    def _knows_all(self, ffn: FeedForwardParts | MixtureParts) -> bool:
        """Whether every parameter belongs to a packed module or a norm, or is one of the sinks or of the mixture."""
        theirs = {id(call.sinks) for call in self.seen.attention if call.sinks is not None}
        of_mixture = ffn.parameters() if isinstance(ffn, MixtureParts) else set()
        return all(id(p) in theirs or path in of_mixture for path, p in self._unknown().items())

    def _unknown(self) -> dict[str, Tensor]:
        """The parameters that belong to neither a packed module nor a norm, by their paths."""
        known = [module for _, module in self.norms]
        known += [module for part in self.head_norms for module in part.modules(self.layer)]
        known += [m for m in self.layer.modules() if isinstance(m, PackedLinear | PackedExperts)]
        theirs = {id(p) for module in known for p in module.parameters(recurse=False)}
        return {path: p for path, p in self.layer.named_parameters() if id(p) not in theirs}

    def _path_of(self, parameter: Tensor | None) -> str | None:
        return next((path for path, p in self.layer.named_parameters() if p is parameter), None)

    def _side_by_side(self, linears: Sequence[PackedLinear]) -> LinearRun | None:
        """The linears as a run, in the order in which they lie, if they fill one."""
        linears = sorted(linears, key=lambda linear: linear.index)
        indices = [linear.index for linear in linears]
        if not linears or indices != list(range(indices[0], indices[0] + len(indices))):
            return None
        if any(linear.group is not linears[0].group for linear in linears):
            return None
        return LinearRun(tuple(self.paths[id(linear)] for linear in linears))

    def _norms_between(self, before: Tensor, after: Tensor) -> list[NormPart | None]:
        """The norms that make `after` of `before`; None is one of them if the two are the same."""
        found: list[NormPart | None] = [] if _differ(before, after) else [None]
        for part, module in self.norms:
            made = _normed(part, module, before)
            if made is not None and not _differ(made, after):
                found.append(part)
        return found

    def _heads(self, projections: Sequence[LinearCall]) -> tuple[Found, Found, Found] | None:
        seen = self.seen
        assert seen.key is not None
        assert seen.value is not None
        raw = torch.cat([c.output for c in sorted(projections, key=lambda c: c.linear.index)], dim=-1)
        kv_heads = seen.key.shape[1]
        norms = [part for part, _ in self.norms]
        query = find_heads(seen.attention[0].query, raw, kv_heads, self.layer, norms, self.head_norms)
        key = find_heads(seen.key, raw, kv_heads, self.layer, norms, self.head_norms)
        value = find_heads(seen.value, raw, kv_heads, self.layer, (), ())
        if query is None or key is None or value is None or key.factor != 1 or value.factor != 1:
            return None
        return query, key, value

    def _halves(self, calls: Sequence[OpCall]) -> Iterator[_FeedForward]:
        """What the calls after attention may be: an FFN, or experts beside one that all tokens go to."""
        mixtures = [call for call in calls if isinstance(call, ExpertsCall)]
        others = [call for call in calls if not isinstance(call, ExpertsCall)]
        dense = self._feed_forward(others)
        if not mixtures and dense is not None:
            yield dense
        if len(mixtures) != 1 or (others and (dense is None or _differ(dense.input, mixtures[0].input))):
            return
        call, loose = mixtures[0], self._unknown()
        router = read_router(call, {**loose, **dict(self.layer.named_buffers())})
        if router is None:
            return
        path = self.paths[id(call.experts)]
        if dense is None:
            yield _FeedForward(MixtureParts(path, router, None, None), call.input, call.output)
            return
        assert isinstance(dense.parts, FeedForwardParts)
        gates = {gate: p for gate, p in loose.items() if p.shape == (1, call.input.shape[-1])}
        for gate in (None, *gates):
            shared = dense.output if gate is None else dense.output * (call.input @ gates[gate].T).sigmoid()
            parts = MixtureParts(path, router, dense.parts, gate)
            yield _FeedForward(parts, call.input, call.output + shared)

    def _feed_forward(self, calls: Sequence[LinearCall | FFNCall]) -> _FeedForward | None:
        if len(calls) == 1 and isinstance(calls[0], FFNCall):
            call = calls[0]
            up, down = (LinearRun((self.paths[id(linear)],)) for linear in (call.up, call.down))
            return _FeedForward(FeedForwardParts(up, False, call.activation, down), call.input, call.output)
        linears = [call for call in calls if isinstance(call, LinearCall)]
        if len(linears) != len(calls) or len(linears) not in (2, 3):
            return None
        *ups, down_call = linears
        run = self._side_by_side([call.linear for call in ups])
        if run is None or any(_differ(call.input, ups[0].input) for call in ups):
            return None
        ups.sort(key=lambda call: call.linear.index)
        raw = torch.cat([call.output for call in ups], dim=-1)
        fused = {call.activation for call in ups}
        if fused != {"none"}:
            kind = (False, fused.pop()) if len(ups) == 1 and not _differ(raw, down_call.input) else None
        else:
            kind = _activation(raw, down_call.input)
        if kind is None:
            return None
        down = LinearRun((self.paths[id(down_call.linear)],))
        return _FeedForward(FeedForwardParts(run, *kind, down), ups[0].input, down_call.output)

    def _residuals(self, attention: Tensor, ffn: _FeedForward) -> Iterator[_Residuals]:
        """The ways from the layer's input and the outputs of attention and FFN to the FFN's input and the layer's output."""
        x, output = self.seen.input, self.seen.output
        assert output is not None
        choices: list[tuple[NormPart, nn.Module] | None] = [None, *self._over_hidden_states()]
        for post, ffn_post in product(choices, repeat=2):
            branch, ffn_branch = _post(post, attention), _post(ffn_post, ffn.output)
            scale = _factor(output - x, branch + ffn_branch)
            if scale is None:
                continue
            for parallel in (False, True):
                entering = x if parallel else x + scale * branch
                for norm in self._norms_between(entering, ffn.input):
                    yield _Residuals(norm, _part(post), _part(ffn_post), None, None, parallel, scale)
        for out, ffn_out in product(choices, repeat=2):
            if out is None and ffn_out is None:
                continue
            middle = _post(out, x + attention)
            if _differ(_post(ffn_out, middle + ffn.output), output):
                continue
            for norm in self._norms_between(middle, ffn.input):
                yield _Residuals(norm, None, None, _part(out), _part(ffn_out), False, 1.0)

    def _over_hidden_states(self) -> list[tuple[NormPart, nn.Module]]:
        return [
            (part, module)
            for part, module in self.norms
            if _normed(part, module, self.seen.input) is not None
        ]


def _activation(raw: Tensor, hidden: Tensor) -> tuple[bool, str] | None:
    """(gated, activation) that make the FFN's `hidden` of what comes out of its first linears."""
    gated = raw.shape[-1] == 2 * hidden.shape[-1]
    gate, up = raw.chunk(2, dim=-1) if gated else (raw, None)
    for name, function in ACTIVATIONS.items():
        made = function(gate) if up is None else function(gate) * up
        if not _differ(made, hidden):
            return gated, name
    return None


def _factor(target: Tensor, branch: Tensor) -> float | None:
    """The number that `branch` must be multiplied by to be `target`, or None if there is none."""
    factor = ((target * branch).sum() / branch.square().sum().clamp_min(1e-30)).item()
    if abs(factor - 1) < _UNITY:
        factor = 1.0
    return factor if abs(factor) > _UNITY and not _differ(factor * branch, target) else None


def _part(choice: tuple[NormPart, nn.Module] | None) -> NormPart | None:
    return None if choice is None else choice[0]


def _post(choice: tuple[NormPart, nn.Module] | None, branch: Tensor) -> Tensor:
    if choice is None:
        return branch
    made = _normed(*choice, branch)
    assert made is not None
    return made


def _normed(part: NormPart, module: nn.Module, input: Tensor) -> Tensor | None:
    """None if the norm is for another number of features."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.shape != input.shape[-1:]:
        return None
    return part.spec.reference(module, input)


def _differ(one: Tensor, other: Tensor) -> bool:
    return row_error(one, other) > _TOLERANCE
