"""Match an encoder layer to its parts: find candidates in a trace of one forward, and verify one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare, row_error
from hf_cpu_accel.hosts.arguments import takes_cache
from hf_cpu_accel.lazy.distance_bias import TOKENS, table_of
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import are_probabilities, probe
from hf_cpu_accel.rewrite.encoder.arguments import (
    hidden_states_of,
    may_decode,
    padded,
    passed_names,
    rotary_tables,
)
from hf_cpu_accel.rewrite.encoder.call_form import ROTARY, SEQUENCES, CallForm
from hf_cpu_accel.rewrite.encoder.candidates import (
    candidates,
    layer_scale_of,
    set_layer_scale_about_one,
    unexplained,
)
from hf_cpu_accel.rewrite.encoder.parts import (
    BIAS,
    CAUSAL,
    MASK,
    EncoderLayerParts,
    EncoderSignature,
    lengthen_tables,
)
from hf_cpu_accel.rewrite.encoder.trace import AttentionCall, LayerTrace
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.tolerance import ENCODER_LAYER, TRACED, Closeness

_HEAD_SIZES = ("head_dim", "attention_head_size")  # attributes of attention modules
_POSITIONS = "position_ids"  # tables contain all about them
# Switches that hosts pass on and that layers ignore: for a cache that encoders do not have, and for outputs of the model.
_SWITCHES = frozenset({"use_cache", "return_dict"})
_LONGEST = "max_seqlen"  # `cu_seqlens` say it
_RESOLUTION = "resolution"

EncoderMatch = tuple[EncoderLayerParts, EncoderSignature]
Fuse = Callable[[nn.Module, EncoderLayerParts, EncoderSignature], Any]


def match_layer(layer: nn.Module, fuse: Fuse) -> EncoderMatch | Refusal:
    """Return the parts and the signature of `layer`, if `fuse` of these agrees with it.

    Raises:
        Refused: the layer rejects its arguments, or has other operations.
    """
    shadow = Shadow(layer)
    set_layer_scale_about_one(shadow.module)
    with torch.no_grad(), shadow.running():
        matched = _Matcher(shadow.module, partial(fuse, shadow.module)).match()
    if isinstance(matched, Refusal):
        return matched
    parts, signature = matched
    return parts.moved(shadow.original, layer_scale_of(layer)), signature


@dataclass
class _Matcher:
    layer: nn.Module
    fuse: Callable[[EncoderLayerParts, EncoderSignature], Any]

    def __post_init__(self) -> None:
        modules = list(self.layer.modules())
        width = next(m.in_features for m in modules if isinstance(m, PackedLinear))
        dtype = next((p.dtype for p in self.layer.parameters() if p.is_floating_point()), torch.float32)
        self.hidden_states = probe(width, dtype)
        self.names = passed_names(self.layer)
        self.packed = SEQUENCES in self.names
        self.head_size = next(
            (vars(m)[name] for name in _HEAD_SIZES for m in modules if isinstance(vars(m).get(name), int)),
            None,
        )

    def match(self) -> EncoderMatch | Refusal:
        """Return the parts and the signature, or a refusal.

        Raises:
            Refused: the layer rejects its arguments, or has other operations.
        """
        trace, output = self._traced()
        signature = self._signature(trace, output)
        relative = self._relative(trace)
        possible = [replace(parts, relative=relative) for parts in candidates(self.layer, trace)]
        if not possible:
            return Refusal("its linears and norms do not match self-attention with a feed-forward network")
        if (unknown := unexplained(self.layer, possible[0])) is not None:
            return Refusal(f"its parameter {unknown} belongs to neither a linear nor a norm")
        for boolean_masks in (True, False):
            called = replace(signature, boolean_masks=boolean_masks)
            best = self._best(possible, called)
            if best is not None:
                return best, called
        return Refusal("its output does not match its linears, norms and attention")

    def _traced(self) -> tuple[LayerTrace, Any]:
        """Return the trace and output of the first form of call that the layer accepts, which is stored in `form`.

        Raises:
            Refused: it accepts none.
        """
        refusals: list[Refusal] = []
        alone = {**self._one_sequence(), **self._alone(turn=False)}
        for form in CallForm.possible(self.names):
            self.form = form
            trace = LayerTrace(self.layer)
            with trace:
                output = form.call(self.layer, self.hidden_states, alone)
            if not isinstance(output, Refusal):
                return trace, output
            refusals.append(output)
        raise Refused(refusals[0])

    def _call(self, hidden_states: Tensor, **arguments: Any) -> Any:
        """Return the output of the layer.

        Raises:
            Refused: the layer rejects the arguments.
        """
        return required(self.form.call(self.layer, hidden_states, arguments))

    def _one_sequence(self) -> dict[str, Any]:
        """Return arguments for the batch as one sequence, so that attention is called once."""
        return {SEQUENCES: torch.tensor([0, self.hidden_states.shape[:2].numel()])} if self.packed else {}

    def _states(self, **arguments: Any) -> Tensor:
        """Return the hidden states that the layer returns.

        Raises:
            Refused: it rejects the arguments, or returns no hidden states.
        """
        output = hidden_states_of(self._call(self.hidden_states, **arguments))
        if not isinstance(output, Tensor) or output.shape != self.hidden_states.shape:
            raise Refused(Refusal("it does not return hidden states of the input's shape"))
        return output

    def _best(
        self, possible: list[EncoderLayerParts], signature: EncoderSignature
    ) -> EncoderLayerParts | None:
        """Return the candidate that agrees with the layer, or None."""
        calls = list(self._calls(signature))
        expected = [self._states(**call) for call in calls]
        best, best_error = None, ENCODER_LAYER.of(self.hidden_states.dtype)
        for parts in possible:
            fused = self.fuse(parts, signature)
            # Calls that the op rejects would be compared with themselves. Without a bias it need not accept all.
            taken = [self.form.arguments(self.hidden_states, call) for call in calls]
            accepted = [fused.accepts(states, **arguments) for states, arguments in taken]
            lacks_bias = "bias" in (signature.rest or ()) and parts.relative is None
            if not (accepted[-1] if lacks_bias else all(accepted)):
                continue
            given = [
                hidden_states_of(required(self.form.call(fused, self.hidden_states, call))) for call in calls
            ]
            error = row_error(given, expected)
            if error <= best_error:
                best, best_error = parts, error
        return best

    def _calls(self, signature: EncoderSignature) -> Iterator[dict[str, Any]]:
        """Yield arguments with padding and without, and with a bias if the layer takes one."""
        batch, length = self.hidden_states.shape[:2]
        alone = self._alone(turn=True)
        if not signature.rotates:
            alone.pop(ROTARY, None)
        elif _POSITIONS in self.names:
            alone[_POSITIONS] = torch.arange(length).expand(batch, -1)
        yield dict(alone)
        if signature.told_causal:
            yield {**alone, CAUSAL: True}
        if self.packed:  # sequences of different lengths
            yield {**alone, SEQUENCES: torch.tensor([0, length - 2, batch * length])}
        if MASK not in self.names or self.packed:
            return
        shown = padded(batch, length)
        hidden = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
        alone[MASK] = hidden.to(self.hidden_states.dtype)
        yield dict(alone)
        if signature.boolean_masks:
            alone[MASK] = shown
            yield dict(alone)
        if BIAS in self.names:
            bias = torch.randn(1, self.heads, length, length, generator=torch.Generator().manual_seed(5))
            yield {**alone, BIAS: bias.to(self.hidden_states.dtype)}

    def _alone(self, *, turn: bool) -> dict[str, Any]:
        """Return the arguments besides hidden states: no mask, and rotary tables, without rotation if not `turn`."""
        given: dict[str, Any] = {MASK: None} if MASK in self.names else {}
        if ROTARY not in self.names or self.head_size is None:
            return given
        length, dtype = self.hidden_states.shape[1], self.hidden_states.dtype
        return {**given, ROTARY: rotary_tables(length, self.head_size, dtype, turn=turn)}

    def _signature(self, trace: LayerTrace, output: Any) -> EncoderSignature:
        """Return the signature that one call shows.

        Raises:
            Refused: its attention is not that of an encoder layer, or it returns values that only itself can compute.
        """
        call = self._attention(trace)
        self.heads = call.heads
        rest: list[Literal["bias"] | None] = []
        for value in output[1:] if isinstance(output, tuple) else ():
            is_bias = isinstance(value, Tensor) and call.bias is not None and torch.equal(value, call.bias)
            if value is not None and not is_bias and not are_probabilities(value):
                raise Refused(Refusal("it returns more than hidden states and its attention bias"))
            rest.append("bias" if is_bias else None)
        rotated, unrotated = (self._states(**self._alone(turn=turn)) for turn in (True, False))
        rotates = not torch.equal(rotated, unrotated)
        ignored = _SWITCHES | ({_POSITIONS} if rotates else set()) | ({_LONGEST} if self.packed else set())
        ignored |= {_RESOLUTION} if self._ignores_resolution(unrotated) else set()
        return EncoderSignature(
            self.names,
            rotates,
            rotates and not self.packed and self._turns_the_last(),
            ignored=ignored,
            form=self.form,
            causal=call.causal,
            told_causal=self._may_be_told_causal(),
            rest=tuple(rest) if isinstance(output, tuple) else None,
        )

    def _attention(self, trace: LayerTrace) -> AttentionCall:
        """Return the call of attention.

        Raises:
            Refused: attention is not called once, or not on outputs of linears.
        """
        if len(trace.attention) != 1:
            times = len(trace.attention)
            raise Refused(Refusal(f"it calls attention {times} times, expected once", yields=True))
        call = trace.attention[0]
        if call is None:
            raise Refused(Refusal("its attention does not read the outputs of its linears", yields=True))
        if call.causal and takes_cache(self.names):
            raise Refused(Refusal("its attention is causal and it takes a cache", yields=True))
        # Decoders with written-out attention hide later tokens only by their mask, and get none here.
        if call.scale is None and may_decode(self.layer, self.names):
            raise Refused(
                Refusal(
                    "it takes a cache and computes attention with matmul and softmax, as decoders do",
                    yields=True,
                )
            )
        return call

    def _ignores_resolution(self, expected: Tensor) -> bool:
        """Return whether the size of the image, from which BEiT's layers may compute a bias, has no effect."""
        if _RESOLUTION not in self.names:
            return False
        given = {**self._alone(turn=False), _RESOLUTION: (self.hidden_states.shape[1] - 1, 1)}
        output = hidden_states_of(self.form.call(self.layer, self.hidden_states, given))
        return isinstance(output, Tensor) and torch.equal(output, expected)

    def _may_be_told_causal(self) -> bool:
        """Return whether `is_causal` makes attention causal."""
        told = LayerTrace(self.layer)
        with told:
            output = self.form.call(self.layer, self.hidden_states, {**self._alone(turn=False), CAUSAL: True})
        causal = [call is not None and call.causal for call in told.attention]
        return not self.packed and not isinstance(output, Refusal) and causal == [True]

    def _turns_the_last(self) -> bool:
        """Return whether tables without the first position act like tables that do not rotate it."""
        given = self._alone(turn=True)
        short = tuple(table[:, 1:] for table in given[ROTARY])
        output = self.form.call(self.layer, self.hidden_states, {**given, ROTARY: short})
        if isinstance(output, Refusal):  # sizes that do not match
            return False
        given[ROTARY] = lengthen_tables(short, self.hidden_states.shape[1])
        expected = self._states(**given)
        output = hidden_states_of(output)
        return compare(output, expected).within(Closeness(TRACED.float32, TRACED.float32))

    def _relative(self, trace: LayerTrace) -> Tensor | None:
        """Return the table of the layer's own position bias, or None.

        Raises:
            Refused: its bias is not a table.
        """
        call = trace.attention[0]
        if call is None or call.bias is None or not call.bias.any():
            return None
        width = self.hidden_states.shape[2]
        longer = LayerTrace(self.layer)
        with longer:
            self._call(self.hidden_states.new_zeros(1, TOKENS, width), **self._alone(turn=False))
        again = longer.attention[0] if longer.attention else None
        table = None if again is None or again.bias is None else table_of(again.bias)
        if table is None:
            raise Refused(Refusal("its attention bias is not a table of relative distances"))
        return table
