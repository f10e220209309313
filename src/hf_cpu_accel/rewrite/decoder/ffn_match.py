"""Match the calls after attention: a feed-forward network, or experts and the parameters of their router, and the ops after
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.check import row_error
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import PANEL_FEATURES
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts, MixtureParts, RouterParts
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.decoder.parts import PerLayerParts
from hf_cpu_accel.rewrite.decoder.randomized_copy import scales_of
from hf_cpu_accel.rewrite.decoder.residuals import Branch, Norms, differ
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace, ExpertsCall, FFNCall, LinearCall, OpCall
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun, side_by_side
from hf_cpu_accel.tolerance import TRACED

K = TypeVar("K")

OTHER_ROUTING = (
    "its router does not choose the experts with the highest scores (it may choose groups first, n_group): "
    "its parts run separately"
)
_SCORINGS: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Ending:
    """The ops after the FFN.

    Attributes:
        per_layer, output_scale: fields of `DecoderParts`.
        calls: the calls before it.
        output: the hidden states that it begins with.
    """

    per_layer: PerLayerParts | None
    output_scale: str | None
    calls: Sequence[OpCall]
    output: Tensor


def endings(
    layer: nn.Module, trace: DecoderTrace, calls: Sequence[OpCall], norms: Norms, paths: Mapping[int, str]
) -> Iterator[Ending]:
    """Yield the possible endings of `layer`, whose `calls` after attention are those of its trace."""
    assert trace.output is not None
    for scale in (None, *scales_of(layer)):
        output = trace.output if scale is None else trace.output / layer.get_buffer(scale)
        yield Ending(None, scale, calls, output)
        *before, gate, last = calls if len(calls) > 1 else (None, None)
        if not isinstance(gate, LinearCall) or not isinstance(last, LinearCall):
            continue
        for name, input in trace.inputs.items():
            activation = _activation_by(gate, input, last.input)
            for norm, branch in norms.after(last.output) if activation else ():
                if activation and not differ(gate.input + branch, output):
                    runs = (LinearRun((paths[id(call.linear)],)) for call in (gate, last))
                    own = PerLayerParts(name, next(runs), activation, next(runs), norm)
                    yield Ending(own, scale, [call for call in before if call], gate.input)


def _activation_by(gate: LinearCall, input: Tensor, hidden: Tensor) -> str | None:
    """Return the activation of the gate's output that gives `hidden` when multiplied by `input`, or None."""
    if input.shape != gate.output.shape or hidden.shape != input.shape or gate.activation != "none":
        return None
    errors = {name: row_error(f(gate.output) * input, hidden) for name, f in ACTIVATIONS.items()}
    return _nearest(errors)


def _nearest(errors: dict[K, float]) -> K | None:
    """Return the key with the smallest error if it is within the tolerance: GELU and its tanh form nearly agree for small
    numbers."""
    best = min(errors, key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > TRACED.float32 else best


@dataclass(frozen=True)
class FeedForwardMatch:
    """The parts of the FFN, with its input and output."""

    parts: FeedForwardParts | MixtureParts
    branch: Branch


class FeedForwardMatcher:
    """Match the calls of a layer after attention.

    Args:
        paths: of the layer's modules, by id.
        loose: the parameters that belong to no packed module and no norm, by path.
        buffers: those of the layer, by path.

    Attributes:
        reason: why nothing matched, if there is a known reason.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        norms: Norms,
        loose: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self.paths, self.norms, self.loose, self.buffers = paths, norms, loose, buffers
        self.reason: str | None = None

    def matches(self, calls: Sequence[OpCall]) -> Iterator[FeedForwardMatch]:
        """Yield the possible matches of `calls`: an FFN, or experts next to one that gets all tokens."""
        mixtures = [call for call in calls if isinstance(call, ExpertsCall)]
        others = [call for call in calls if not isinstance(call, ExpertsCall)]
        dense = self._dense(others)
        if not mixtures and dense is not None:
            yield dense
        if len(mixtures) != 1 or (
            others and (dense is None or differ(dense.branch.input, mixtures[0].input))
        ):
            return
        call = mixtures[0]
        router = read_router(call, {**self.loose, **self.buffers})
        if router is None:
            self.reason = OTHER_ROUTING
            return
        path = self.paths[id(call.experts)]
        if dense is None:
            yield FeedForwardMatch(MixtureParts(path, router, None, None), Branch(call.input, call.output))
            return
        assert isinstance(dense.parts, FeedForwardParts)
        gates = {gate: p for gate, p in self.loose.items() if p.shape == (1, call.input.shape[-1])}
        for gate in (None, *gates):
            shared = dense.branch.output
            if gate is not None:
                shared = shared * (call.input @ gates[gate].T).sigmoid()
            parts = MixtureParts(path, router, dense.parts, gate)
            yield FeedForwardMatch(parts, Branch(call.input, call.output + shared))

    def _dense(self, calls: Sequence[OpCall]) -> FeedForwardMatch | None:
        if len(calls) == 1 and isinstance(calls[0], FFNCall):
            call = calls[0]
            up, down = side_by_side([call.up], self.paths), side_by_side([call.down], self.paths)
            assert up is not None
            assert down is not None
            return FeedForwardMatch(
                FeedForwardParts(up, False, call.activation, down), Branch(call.input, call.output)
            )
        linears = [call for call in calls if isinstance(call, LinearCall)]
        if len(linears) != len(calls) or len(linears) not in (2, 3):
            return None
        *ups, last = linears
        run, down = side_by_side([c.linear for c in ups], self.paths), side_by_side([last.linear], self.paths)
        if run is None or down is None or any(differ(call.input, ups[0].input) for call in ups):
            return None
        form = self._form(ups, last.input)
        if form is None:
            return None
        if form[0] and last.linear.in_features % PANEL_FEATURES:
            self.reason = f"its gate has {last.linear.in_features} features, which is not a multiple of {PANEL_FEATURES}"
            return None
        gated, activation, norm = form
        parts = FeedForwardParts(run, gated, activation, down, norm)
        return FeedForwardMatch(parts, Branch(ups[0].input, last.output))

    def _form(self, ups: Sequence[LinearCall], hidden: Tensor) -> tuple[bool, str, NormPart | None] | None:
        """Return (gated, activation, norm) that map the output of the first linears to the FFN's `hidden`, or None."""
        raw = torch.cat([c.output for c in sorted(ups, key=lambda call: call.linear.index)], dim=-1)
        gated = raw.shape[-1] == 2 * hidden.shape[-1]
        gate, up = raw.chunk(2, dim=-1) if gated else (raw, None)
        done = {call.activation for call in ups}
        errors: dict[tuple[bool, str, NormPart | None], float] = {}
        for name, function in ACTIVATIONS.items():
            if done == {"none"}:
                made = function(gate) if up is None else function(gate) * up
            elif done == {name} and len(ups) == 1:
                gated, made = False, raw
            else:
                continue
            if made.shape == hidden.shape:
                for norm, normed in self.norms.after(made):
                    errors.setdefault((gated, name, norm), row_error(normed, hidden))
        return _nearest(errors)


def read_router(call: ExpertsCall, tensors: Mapping[str, Tensor]) -> RouterParts | None:
    """Return the router that sent the tokens of `call` to their experts, from parameters and buffers by path, or None."""
    experts, features = call.experts.weights.experts, call.input.shape[-1]
    x, index, weights = (part.flatten(0, 1) for part in (call.input, call.index, call.weights))
    top_k = index.shape[1]
    chosen = index.sort(dim=-1).values
    matrices = {path: t for path, t in tensors.items() if t.shape == (experts, features)}
    for weight, bias, choice_bias in _places(matrices, tensors, experts):
        logits = F.linear(x, matrices[weight].float(), None if bias is None else tensors[bias].float())
        for scoring in _SCORINGS:
            scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
            order = scores if choice_bias is None else scores + tensors[choice_bias].float()
            if not torch.equal(order.topk(top_k).indices.sort(dim=-1).values, chosen):
                continue
            for renormalize, scale in _weights(scores.gather(-1, index), weights):
                return RouterParts(weight, bias, top_k, scoring, choice_bias, renormalize, scale)
    return None


def _places(
    matrices: Mapping[str, Tensor], tensors: Mapping[str, Tensor], experts: int
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield possible paths of weight, bias and choice bias: biases are next to the weight or above it, and each has a purpose."""
    for weight in matrices:
        beside = [
            path
            for path, t in tensors.items()
            if t.shape == (experts,) and weight.startswith(f"{path.rpartition('.')[0]}.")
        ]
        for bias, choice_bias in product((None, *beside), (None, *beside)):
            if {bias, choice_bias} - {None} == set(beside) and (bias is None or bias != choice_bias):
                yield weight, bias, choice_bias


def _weights(scores: Tensor, weights: Tensor) -> Iterator[tuple[bool, float]]:
    """Yield the (renormalize, scale) that give `weights` from the `scores` of the chosen experts, [T, k] both."""
    for renormalize in (False, True):
        made = scores / scores.sum(dim=-1, keepdim=True) if renormalize else scores
        scale = ((weights * made).sum() / made.square().sum()).item()
        scale = 1.0 if abs(scale - 1) < TRACED.float32 else scale
        if row_error(made * scale, weights) <= TRACED.float32:
            yield renormalize, scale
