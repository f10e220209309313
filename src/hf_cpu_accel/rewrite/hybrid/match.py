"""Find the recurrent layers that can defer their steps: match their parts, and compare with their separate computation."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import attempt, call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts, MixtureParts
from hf_cpu_accel.rewrite.decoder.ffn_match import FeedForwardMatcher
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.decoder.randomized_copy import randomized_copy_of
from hf_cpu_accel.rewrite.decoder.residuals import Norms, differ
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace
from hf_cpu_accel.rewrite.decoder.watch import record_calls
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.hybrid.step import RecurrentParts, RecurrentStep
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun
from hf_cpu_accel.rewrite.mixer.match import prompt_and_token
from hf_cpu_accel.rewrite.mixer.whole_layer import FusedMixerLayer, GatedParts, LayerParts
from hf_cpu_accel.rewrite.norm.match import FusedNorm, identify_bare_norm, identify_norm
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer
from hf_cpu_accel.tolerance import RECURRENT_MIXER

STRUCTURE = "recurrent step"


def join_recurrent_steps(context: Context) -> list[PlanItem]:
    """Make every recurrent layer defer its steps if it can. Call it after recurrent layers, and layers with attention, are
    fused.

    Returns:
        A row for each layer that computes its steps alone. The others have a row already, since they are fused with or
        without it.
    """
    alone = []
    for path, layer in context.root.named_modules():
        if not isinstance(layer, FusedMixerLayer) or not isinstance(_mixer_of(layer), RecurrentMixer):
            continue
        parts = attempt(path, _match_recurrent_step, layer)
        if isinstance(parts, RecurrentParts):
            layer._step = RecurrentStep(parts, _hooks_ahead_of_next(context.root, path))
        elif isinstance(parts, Refusal):
            alone.append(PlanItem.left(path, STRUCTURE, parts.reason))
    return alone


def _hooks_ahead_of_next(root: nn.Module, path: str) -> dict[int, Any] | None:
    """Return the pre-hooks of the module that reads the hidden states of a layer, or None if the model may return them."""
    above, _, number = path.rpartition(".")
    layers = root.get_submodule(above)
    if not isinstance(layers, nn.ModuleList):
        return None
    if int(number) + 1 < len(layers):
        return layers[int(number) + 1]._forward_pre_hooks
    owner = root.get_submodule(above.rpartition(".")[0])
    norms = [child for child in owner.children() if isinstance(child, FusedNorm)]
    return norms[-1]._forward_pre_hooks if norms else None


def _match_recurrent_step(layer: FusedMixerLayer) -> RecurrentParts | Refusal:
    """Return the parts of the layer, or a refusal if the op does not support one or disagrees."""
    parts = _parts_of(layer)
    if isinstance(parts, Refusal):
        return parts
    allowed = RECURRENT_MIXER.of(next(m.weight_dtype for m in layer.modules() if isinstance(m, PackedLinear)))
    comparison = compare(_outputs(layer, parts), _outputs(layer, None))
    chooses = isinstance(parts.ffn, MixtureParts)  # rounding may send a token to another expert
    error = comparison.most if chooses else comparison.worst
    return (
        parts
        if error <= allowed
        else Refusal(f"the joint call differs by {error:.1e} (allowed {allowed:.0e})")
    )


def _outputs(layer: FusedMixerLayer, parts: RecurrentParts | None) -> tuple[Tensor, ...]:
    shadow = Shadow(layer)
    shadow.module.__dict__["_step"] = None if parts is None else RecurrentStep(parts, None)
    with torch.no_grad(), shadow.running():
        outputs, _ = prompt_and_token(shadow.module)
    return outputs


def _mixer_of(layer: FusedMixerLayer) -> nn.Module | None:
    return layer._modules[layer._parts.mixer]


def _parts_of(layer: FusedMixerLayer) -> RecurrentParts | Refusal:
    """Return the parts, or a refusal if the op does not support one."""
    known: LayerParts = layer._parts
    mixer: Any = _mixer_of(layer)
    if mixer._mixer.recurrence(mixer, None) is None:
        return _alone(mixer._mixer.alone)
    inputs = _runs(layer, [f"{known.mixer}.{name}" for name in mixer.first])
    if inputs is None:
        return _alone("its input projections are not packed as one or two products")
    features = mixer.get_submodule(mixer.last).out_features
    names = (known.norm, known.ffn_norm, known.post, known.ffn_post)
    norms = [None if name is None else _norm(layer, name, features) for name in names]
    norm, ffn_norm, post, ffn_post = norms
    if [part is not None for part in norms] != [name is not None for name in names] or norm is None:
        return _alone("one of its norms is neither LayerNorm nor RMSNorm")
    ffn = _feed_forward(layer, known.ffn, features) if known.ffn else None
    if isinstance(ffn, Refusal):
        return ffn
    output = LinearRun((f"{known.mixer}.{mixer.last}",))
    return RecurrentParts(known.mixer, inputs, output, ffn, norm, ffn_norm, post, ffn_post, scale=known.scale)


def _feed_forward(
    layer: nn.Module, known: tuple[GatedParts | str, ...], features: int
) -> FeedForwardParts | MixtureParts | Refusal:
    first, *more = known
    if more or isinstance(first, str):
        names = [part if isinstance(part, str) else part.module for part in known]
        return _mixture(layer, names, features)
    if first.gate_last:
        return _alone("the gate is in the second half of its feed-forward network")
    return FeedForwardParts(LinearRun(first.ups), True, first.activation, LinearRun((first.down,)))


def _mixture(layer: nn.Module, names: list[str], features: int) -> MixtureParts | Refusal:
    """Return the modules of these names, whose outputs are added, as a mixture of experts, or a refusal."""
    copied = randomized_copy_of(layer)
    input = torch.randn(2, 9, features, generator=torch.Generator().manual_seed(0))
    trace = DecoderTrace(input, None)
    expected = torch.zeros(input.shape)
    with torch.no_grad(), record_calls(copied, trace):
        for name in names:
            output = call_foreign(copied.get_submodule(name), input)
            if isinstance(output, Refusal):
                return output
            first: Tensor = output[0] if isinstance(output, tuple) else output
            expected = expected + first.view(input.shape)
    packed = [m for m in copied.modules() if isinstance(m, PackedLinear | PackedExperts)]
    known = {id(p) for module in packed for p in module.parameters(recurse=False)}
    loose = {
        path: parameter
        for path, parameter in copied.named_parameters()
        if path.startswith(tuple(f"{name}." for name in names)) and id(parameter) not in known
    }
    paths = {id(module): path for path, module in copied.named_modules()}
    matcher = FeedForwardMatcher(paths, Norms(copied, features), loose, dict(copied.named_buffers()))
    for match in matcher.matches(trace.stages[0]):
        parts, branch = match.parts, match.branch
        if not isinstance(parts, MixtureParts) or set(loose) - parts.parameters():
            continue
        if not differ(branch.input, input) and not differ(branch.output, expected):
            return parts
    return Refusal(matcher.reason) if matcher.reason else _alone("its feed-forward network is not supported")


def _alone(obstacle: str) -> Refusal:
    return Refusal(f"{obstacle}: it runs as separate ops in decoding")


def _norm(layer: nn.Module, path: str, features: int) -> NormPart | None:
    module = layer.get_submodule(path)
    spec = identify_norm(module) or identify_bare_norm(module, features)
    return None if spec is None or spec.kind not in ("rms_norm", "layer_norm") else NormPart(path, spec)


def _runs(layer: nn.Module, paths: list[str]) -> tuple[LinearRun, ...] | None:
    """Return the linears as at most two runs, in this order, or None."""
    linears: list[Any] = [layer.get_submodule(path) for path in paths]
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    # Adjacent numbers minus their positions are equal.
    keys = [(id(linear.group), linear.index - number) for number, linear in enumerate(linears)]
    grouped = groupby(zip(keys, paths, strict=True), key=lambda pair: pair[0])
    runs = tuple(LinearRun(tuple(path for _, path in run)) for _, run in grouped)
    return runs if len(runs) <= 2 else None
