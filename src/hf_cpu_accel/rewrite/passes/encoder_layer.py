"""An encoder layer in a program: attention and a feed-forward network, each with a norm and a residual sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import takes_cache
from hf_cpu_accel.lazy.distance_bias import TOKENS, table_of
from hf_cpu_accel.rewrite.capture.attention.attention_step import Attention
from hf_cpu_accel.rewrite.capture.normal_forms import PLUS, TANH, TIMES
from hf_cpu_accel.rewrite.capture.program import Ref, Step, refs_in
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import are_probabilities, probe
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.passes.arguments import (
    hidden_states_of,
    may_decode,
    padded,
    passed_names,
    rotary_tables,
)
from hf_cpu_accel.rewrite.passes.attention import (
    AttentionCall,
    AttentionStep,
    attention_steps,
    merged_rows,
    read_attention,
)
from hf_cpu_accel.rewrite.passes.call_form import ROTARY, SEQUENCES, CallForm
from hf_cpu_accel.rewrite.passes.ffn import read_ffn
from hf_cpu_accel.rewrite.passes.graph import Graph
from hf_cpu_accel.rewrite.passes.parts import (
    BIAS,
    CAUSAL,
    MASK,
    EncoderLayerParts,
    EncoderSignature,
    NormPart,
    are_adjacent,
)
from hf_cpu_accel.tolerance import ENCODER_LAYER

_HEAD_SIZES = ("head_dim", "attention_head_size")  # attributes of attention modules
_POSITIONS = "position_ids"  # tables contain all about them
# Switches that hosts pass on and that layers ignore: for a cache that encoders do not have, and for outputs of the model.
_SWITCHES = frozenset({"use_cache", "return_dict"})
_LONGEST = "max_seqlen"  # `cu_seqlens` say it
_RESOLUTION = "resolution"
_OTHER = "its linears and norms do not match self-attention with a feed-forward network"

EncoderMatch = tuple[EncoderLayerParts, EncoderSignature]
Fuse = Callable[[nn.Module, EncoderLayerParts, EncoderSignature], Any]


@dataclass(frozen=True)
class _Branch:
    """residual + gain * linear(...), which a norm may follow.

    Attributes:
        moved: the output of the linear, in the order of the residual.
    """

    residual: Any
    linear: Step
    moved: Any
    gain: nn.Parameter | None
    bounded: bool
    norm: NormPart | None

    @classmethod
    def of(cls, graph: Graph, ref: Any) -> _Branch | None:
        """Return the branch whose sum, or the norm of it, is `ref`, or None."""
        norm, ref = graph.norm(ref)
        total = graph.producer(ref)
        if total is None or total.function not in PLUS or len(total.args) != 2 or total.kwargs:
            return None
        for branch, residual in (total.args, total.args[::-1]):
            gain, bounded, moved = _scaled(graph, branch)
            step = graph.made.get(graph.behind_moves(moved))
            if step is not None and isinstance(step.leaf, PackedLinear):
                return cls(graph.behind_moves(residual), step, moved, gain, bounded, norm)
        return None

    def keeps(self, graph: Graph, rows: Tensor | None) -> bool:
        """Return whether the token of each row of the linear, int64 [rows], ends in its own place."""
        if rows is None:
            return False
        shape = graph.values[self.linear.result].shape
        numbers = rows.double().view(*shape[:-1], 1).expand(shape)
        placed = graph.evaluate(self.moved, {self.linear.result: numbers}).flatten(0, -2)[:, 0]
        return torch.equal(placed, torch.arange(len(rows), dtype=placed.dtype))


def _scaled(graph: Graph, ref: Any) -> tuple[nn.Parameter | None, bool, Any]:
    """Return the parameter that multiplies a branch, whether by its tanh, and the branch without it."""
    step = graph.producer(ref)
    if step is None or step.function not in TIMES:
        return None, False, ref
    for gain, rest in (step.args, step.args[::-1]):
        bent = graph.producer(gain)
        bounded = bent is not None and bent.function in TANH
        reader = graph.reader(bent.args[0] if bent is not None and bounded else gain)
        if reader is not None:
            return reader.tensors[reader.name], bounded, rest
    return None, False, ref


def read_layer(
    graph: Graph, output: Any, found: AttentionStep, call: AttentionCall
) -> EncoderLayerParts | None:
    """Return the parts of a layer whose hidden states are `output`, or None."""
    ffn = _Branch.of(graph, graph.behind_moves(output))
    network = None if ffn is None else read_ffn(graph, ffn.linear)
    attention = None if ffn is None else _Branch.of(graph, ffn.residual)
    if ffn is None or network is None or attention is None:
        return None
    if not attention.keeps(graph, merged_rows(graph, found, attention.linear.args[0])):
        return None
    pre_norm, no_norm = ffn.norm is None, attention.norm is None
    input = graph.behind_moves(_input(graph, found))
    before, states = graph.norm(input) if pre_norm else (None, input)
    before_ffn, ffn_input = (
        graph.norm(graph.behind_moves(network.input)) if pre_norm else (None, network.input)
    )
    fits = pre_norm == no_norm and (before_ffn is not None) == pre_norm
    fits = fits and graph.behind_moves(ffn_input) == ffn.residual
    gains = [gain for gain in (attention.gain, ffn.gain) if gain is not None]
    if (
        not fits
        or graph.behind_moves(states) != attention.residual
        or len(gains) == 1
        or attention.bounded != ffn.bounded
    ):
        return None
    if len(network.up) == 2 and (not are_adjacent(network.up) or network.up[0].index > network.up[1].index):
        return None
    width = call.heads * call.head_size
    offsets = sorted(part.offset for part in (call.query, call.key, call.value))
    parts = EncoderLayerParts(
        attention=call,
        scale=call.scale or 1.0,
        output=attention.linear.leaf,
        attention_norm=before if pre_norm else attention.norm,
        up=network.up,
        down=network.down,
        ffn_norm=before_ffn if pre_norm else ffn.norm,  # type: ignore[arg-type]
        activation=network.activation,
        gated=network.gated,
        pre_norm=pre_norm,
        layer_scale=(gains[0], gains[1]) if gains else None,
        bounded_scale=ffn.bounded,
    )
    whole = sum(linear.out_features for linear in parts.projections) == 3 * width and are_adjacent(
        parts.projections
    )
    return parts if whole and [offset - offsets[0] for offset in offsets] == [0, width, 2 * width] else None


def _input(graph: Graph, found: AttentionStep) -> Any:
    """Return the input of the projections, or None if they have several."""
    inputs = {graph.behind_casts(step.args[0]) for ref in found.operands for step in graph.linears(ref)}
    return inputs.pop() if len(inputs) == 1 else None


def match_layer(layer: nn.Module, fuse: Fuse) -> EncoderMatch | Refusal:
    """Return the parts and the signature of `layer`, if `fuse` of these agrees with it.

    Raises:
        Refused: the layer rejects its arguments, or has other operations.
    """
    shadow = Shadow(layer)
    with torch.no_grad():
        return _Matcher(shadow, partial(fuse, shadow.module)).match()


@dataclass
class _Matcher:
    shadow: Shadow
    fuse: Callable[[EncoderLayerParts, EncoderSignature], Any]

    def __post_init__(self) -> None:
        self.layer = self.shadow.module
        modules = list(self.layer.modules())
        width = next(m.in_features for m in modules if isinstance(m, PackedLinear))
        dtype = next((p.dtype for p in self.layer.parameters() if p.is_floating_point()), torch.float32)
        self.hidden_states = probe(width, dtype)
        self.names = passed_names(self.layer)
        self.packed = SEQUENCES in self.names
        sizes = (vars(m).get(name) for name in _HEAD_SIZES for m in modules)
        self.head_size = next((size for size in sizes if isinstance(size, int)), None)

    def match(self) -> EncoderMatch | Refusal:
        """Return the parts and the signature, or a refusal.

        Raises:
            Refused: the layer rejects its arguments, or has other operations.
        """
        graph = self._captured()
        found, call = self._attention(graph)
        output, *rest = graph.output if isinstance(graph.output, list | tuple) else (graph.output,)
        parts = read_layer(graph, output, found, call)
        if parts is None:
            return Refusal(_OTHER)
        relative = self._relative(graph, found)
        parts, self.heads = replace(parts, relative=relative), call.heads
        if (unknown := _unexplained(self.shadow.original(self.layer), parts)) is not None:
            return Refusal(f"its parameter {unknown} belongs to neither a linear nor a norm")
        rotates = not set(graph.sources(list(found.operands[:2]))).isdisjoint(self._tables(graph))
        signature = self._signature(graph, found, rotates, rest)
        return self._verified(parts, signature)

    def _captured(self) -> Graph:
        """Return the graph of the first form of call that the layer accepts, which is stored in `form`.

        Raises:
            Refused: it accepts none.
        """
        refusals: list[Refusal] = []
        for form in CallForm.possible(self.names):
            self.form = form
            states, arguments = form.arguments(self.hidden_states, self._arguments())
            graph = attempt("", Graph.of, self.shadow, states, **arguments)
            if not isinstance(graph, Refusal):
                return graph
            refusals.append(graph)
        raise Refused(refusals[0])

    def _arguments(self) -> dict[str, Any]:
        """Return all arguments of a call besides hidden states."""
        batch, length, dtype = *self.hidden_states.shape[:2], self.hidden_states.dtype
        given: dict[str, Any] = {}
        if self.packed:  # one sequence, so that attention is called once
            given[SEQUENCES] = torch.tensor([0, batch * length])
        elif MASK in self.names:
            hidden = torch.zeros(batch, 1, length, length)
            given[MASK] = hidden.masked_fill(~padded(batch, length), torch.finfo(torch.float32).min).to(dtype)
        if ROTARY in self.names and self.head_size is not None:
            given[ROTARY] = rotary_tables(length, self.head_size, dtype, turn=True)
            if _POSITIONS in self.names:
                given[_POSITIONS] = torch.arange(length).expand(batch, -1)
        return given

    def _attention(self, graph: Graph) -> tuple[AttentionStep, AttentionCall]:
        """Return the step of attention, and its call.

        Raises:
            Refused: attention is not called once, or is not that of an encoder layer.
        """
        steps = list(attention_steps(graph))
        if len(steps) != 1:
            raise Refused(Refusal(f"it calls attention {len(steps)} times, expected once", yields=True))
        call = read_attention(graph, steps[0], self._tables(graph))
        if call is None:
            raise Refused(Refusal("its attention does not read the outputs of its linears", yields=True))
        if call.causal and takes_cache(self.names):
            raise Refused(Refusal("its attention is causal and it takes a cache", yields=True))
        # Decoders with written-out attention hide later tokens only by their mask.
        if isinstance(steps[0].step.function, Attention) and may_decode(self.layer, self.names):
            reason = "it takes a cache and computes attention with matmul and softmax, as decoders do"
            raise Refused(Refusal(reason, yields=True))
        return steps[0], call

    def _tables(self, graph: Graph) -> tuple[Ref, ...]:
        return tuple(refs_in(graph.inputs.get(ROTARY)))

    def _relative(self, graph: Graph, found: AttentionStep) -> Tensor | None:
        """Return the table of the layer's own position bias, or None.

        Raises:
            Refused: its bias is not a table.
        """
        (masks,) = ({*refs_in(graph.inputs.get(MASK))},)
        biases = [ref for ref in found.masks if not masks.issuperset(graph.sources(ref))]
        if not biases:
            return None
        states = self.hidden_states.new_zeros(1, TOKENS, self.hidden_states.shape[2])
        shapes = {graph.inputs["0"]: states, **{ref: states.new_zeros(1, 1, TOKENS, TOKENS) for ref in masks}}
        count = 1 + max(ref.number for ref in refs_in(graph.inputs))
        inputs = [shapes.get(Ref(number)) for number in range(count)]
        table = table_of(graph.program(biases[0], count)(inputs)) if len(biases) == 1 else None
        if table is None:
            raise Refused(Refusal("its attention bias is not a table of relative distances"))
        return table

    def _signature(
        self, graph: Graph, found: AttentionStep, rotates: bool, rest: list[Any]
    ) -> EncoderSignature:
        """Return the signature that the call shows.

        Raises:
            Refused: the layer returns values that only itself can compute.
        """
        kinds: list[Literal["bias"] | None] = []
        for ref in rest:
            is_bias = isinstance(ref, Ref) and ref in found.masks
            value = graph.values.get(ref) if isinstance(ref, Ref) else ref
            if (
                value is not None
                and not is_bias
                and not (isinstance(value, Tensor) and are_probabilities(value))
            ):
                raise Refused(Refusal("it returns more than hidden states and its attention bias"))
            kinds.append("bias" if is_bias else None)
        ignored = _SWITCHES | ({_POSITIONS} if rotates else set()) | ({_LONGEST} if self.packed else set())
        return EncoderSignature(
            self.names,
            rotates,
            ignored=ignored,
            form=self.form,
            causal=found.causal,
            rest=tuple(kinds) if isinstance(graph.result, tuple) else None,
        )

    def _verified(self, parts: EncoderLayerParts, signature: EncoderSignature) -> EncoderMatch | Refusal:
        """Return the parts, with the signature of the calls in which they agree with the layer."""
        other = Refusal("its output does not match its linears, norms and attention")
        with self.shadow.running():
            alone, *more = self._calls(signature)
            if not self._agrees(parts, signature, alone):
                return other
            for call in more:
                if not self._agrees(parts, signature, call):
                    return other
            if signature.boolean_masks and MASK in self.names and not self.packed:
                shown = padded(*self.hidden_states.shape[:2])
                accepts = self._agrees(parts, signature, {**alone, MASK: shown})
                signature = replace(signature, boolean_masks=accepts)
            told = replace(signature, told_causal=True)
            if not self.packed and self._agrees(parts, told, {**alone, CAUSAL: True}):
                signature = told
            if signature.rotates and not self.packed:
                tables = tuple(table[:, 1:] for table in alone[ROTARY])
                prefix = replace(signature, prefix_tokens=True)
                if self._agrees(parts, prefix, {**alone, ROTARY: tables}):
                    signature = prefix
        return parts, signature

    def _calls(self, signature: EncoderSignature) -> Iterator[dict[str, Any]]:
        """Yield arguments without a mask, with one, and with a bias, as far as the layer takes them."""
        given = self._arguments()
        if not signature.rotates:
            given = {name: value for name, value in given.items() if name not in (ROTARY, _POSITIONS)}
        yield {**given, MASK: None} if MASK in given else given
        batch, length = self.hidden_states.shape[:2]
        if self.packed:  # sequences of different lengths
            yield {**given, SEQUENCES: torch.tensor([0, length - 2, batch * length])}
        if MASK in given:
            yield given
        if BIAS in self.names:
            heads = self.heads
            bias = torch.randn(1, heads, length, length, generator=torch.Generator().manual_seed(5))
            yield {**given, BIAS: bias.to(self.hidden_states.dtype)}

    def _agrees(self, parts: EncoderLayerParts, signature: EncoderSignature, call: dict[str, Any]) -> bool:
        """Return whether the op computes what the layer computes."""
        fused = self.fuse(parts, signature)
        states, arguments = self.form.arguments(self.hidden_states, call)
        lacks_bias = "bias" in (signature.rest or ()) and parts.relative is None and BIAS not in call
        if not lacks_bias and not fused.accepts(states, **arguments):
            return False
        expected = self.form.call(self.layer, self.hidden_states, call)
        if isinstance(expected, Refusal):
            return False
        output = hidden_states_of(required(self.form.call(fused, self.hidden_states, call)))
        bound = ENCODER_LAYER.of(self.hidden_states.dtype)
        return compare(output, hidden_states_of(expected)).within(bound)


def _unexplained(layer: nn.Module, parts: EncoderLayerParts) -> str | None:
    """Return the path of a parameter that the parts do not explain, or None."""
    modules = [
        *parts.linears,
        *(norm[0] for norm in (parts.attention_norm, parts.ffn_norm) if norm is not None),
    ]
    known = {id(p) for module in modules for p in module.parameters(recurse=False)}
    known |= {id(gain) for gain in parts.layer_scale or ()}
    for path, p in layer.named_parameters():
        is_table = parts.relative is not None and p.dim() == 2 and p.shape[1] == parts.attention.heads
        if id(p) not in known and not is_table:
            return path
    return None
