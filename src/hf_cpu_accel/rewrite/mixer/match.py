"""Fuse whole layers with a fused mixer: match their modules, and compare with their own forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare, row_error
from hf_cpu_accel.hosts.arguments import parameters_of, with_its_cache_name
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import PANEL_FEATURES
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.refusal import Refusal, is_listed
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.linear.layer import PackedLinear, is_permuted
from hf_cpu_accel.rewrite.mixer.mixer import FusedMixer, holds_weights
from hf_cpu_accel.rewrite.mixer.whole_layer import FusedMixerLayer, GatedParts, LayerParts
from hf_cpu_accel.rewrite.norm.match import FusedNorm, identify_bare_norm
from hf_cpu_accel.tolerance import EXACT, RECURRENT_MIXER

_BATCH, _TOKENS, _PADDING = 2, 7, 2

M = TypeVar("M", bound=FusedMixer)


def fuse_mixer_layers(
    context: Context, kind: type[M], structure: str, op_of: Callable[[M], str]
) -> list[PlanItem]:
    """Fuse every layer of the model that has a mixer of this kind. Call it after mixers are fused.

    Args:
        structure: the name of the layer in the plan.
        op_of: returns the op of a mixer.
    """

    def op_and_dtype(fused: FusedMixerLayer, path: str) -> tuple[str, str]:
        mixer: Any = fused._modules[fused._parts.mixer]
        return f"{op_of(mixer)}, ffn" if fused._parts.ffn else op_of(mixer), context.dtypes.names(path, fused)

    def look(layer: nn.Module, path: str, context: Context) -> FusedMixerLayer | Refusal | None:
        mixers = [name for name, child in layer.named_children() if isinstance(child, kind)]
        if not mixers or isinstance(layer, FusedModuleMixin) or not is_listed(context.root, path):
            return None
        return _match_mixer_layer(layer, path, mixers, context)

    return fuse_each(context, structure, look, op_and_dtype)


def _match_mixer_layer(
    layer: nn.Module, path: str, mixers: list[str], context: Context
) -> FusedMixerLayer | Refusal:
    reason = refusal_to_swap(layer, path, context) or _unsupported_reason(layer, mixers)
    if reason is not None:
        return Refusal(reason)
    ran = _outputs(layer)
    if isinstance(ran, Refusal):
        return ran
    expected, nones = ran
    mixer: Any = layer._modules[mixers[0]]
    features = mixer.get_submodule(mixer.last).out_features
    allowed = RECURRENT_MIXER.of(expected[0].dtype)
    for candidate in _candidates(layer, mixers[0], features):
        parts = replace(candidate, nones=nones)
        error = _error(layer, parts, expected)
        if error <= allowed:
            return _build_mixer_layer(layer, parts)
    return Refusal("its residuals, norms or feed-forward network are not supported: its parts run separately")


def _unsupported_reason(layer: nn.Module, mixers: list[str]) -> str | None:
    if len(mixers) > 1 or layer._parameters:
        return "it has several mixers, or parameters outside its modules"
    if is_permuted(layer):
        return "one of its linears reorders its input features (act-order quantization)"
    mixer: Any = layer._modules[mixers[0]]
    last = mixer.get_submodule(mixer.last)
    if not isinstance(last, PackedLinear):
        return "the output projection of its mixer is not packed"
    norms, others = _rest(layer, mixers[0])
    if len(others) > 2 or len(norms) not in ((2, 4) if others else (1,)):
        return (
            "it has modules other than a mixer, one to four norms and up to two feed-forward networks: "
            "its parts run separately"
        )
    return None


def _rest(layer: nn.Module, mixer: str) -> tuple[list[str], list[str]]:
    """Return the names of the norms and layer scales, and of the other modules with weights except the mixer."""
    children: dict[str, Any] = dict(layer.named_children())
    attending = children.pop(mixer)
    features = attending.get_submodule(attending.last).out_features
    norms = [name for name, child in children.items() if _is_norm(child, features)]
    return norms, [name for name, child in children.items() if name not in norms and holds_weights(child)]


def _is_norm(module: nn.Module, features: int) -> bool:
    """Return whether the module may be a norm, or a multiplication by a vector (LayerScale); its place is found by trying."""
    if isinstance(module, FusedNorm | nn.LayerNorm):
        return True
    own = list(module._parameters.values())
    scales = not module._modules and len(own) == 1 and own[0] is not None and own[0].dim() == 1
    return scales or identify_bare_norm(module, features) is not None


def _candidates(layer: nn.Module, mixer: str, features: int) -> Iterator[LayerParts]:
    norms, others = _rest(layer, mixer)
    parts = tuple(_feed_forward(layer, name, features) for name in others)
    scales = sorted({1.0, *(v for v in vars(layer).values() if isinstance(v, float))})
    for order, scale in itertools.product(itertools.permutations(norms), scales):
        norm, ffn_norm, post, ffn_post = (*order, None, None, None)[:4]
        yield LayerParts(mixer, norm, ffn_norm, parts, scale, post, ffn_post)  # type: ignore[arg-type]


def _feed_forward(layer: nn.Module, name: str, features: int) -> GatedParts | str:
    """Return the module of this name as one op, or its name."""
    ways = list(_gated(layer, name, features))
    if not ways:
        return name
    shadow = Shadow(layer)
    dtype = next(m.weight_dtype for m in layer.modules() if isinstance(m, PackedLinear))
    x = torch.randn(1, _TOKENS, features, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad(), shadow.running():
        expected = call_foreign(shadow.module.get_submodule(name), x)
        if not isinstance(expected, Tensor):
            return name
        best: GatedParts | str = name
        least = RECURRENT_MIXER.of(dtype)
        for way in ways:  # the closest: GELU and its tanh form are both well within the bound
            error = row_error(way.bind(shadow.module, residual=False)(x), expected)
            if error <= least:
                best, least = way, error
            if error <= EXACT:
                break
        return best


def _gated(layer: nn.Module, name: str, features: int) -> Iterator[GatedParts]:
    """Yield the possible gated feed-forward networks of the module of this name."""
    linears = {
        f"{name}.{path}": linear
        for path, linear in layer.get_submodule(name).named_modules()
        if isinstance(linear, PackedLinear)
    }
    functions = ["silu", *(other for other in ACTIVATIONS if other != "silu")]
    for down in (path for path, linear in linears.items() if linear.out_features == features):
        ups = sorted((path for path in linears if path != down), key=lambda path: linears[path].index)
        if not _are_halves([linears[path] for path in ups], linears[down].in_features):
            continue
        for activation, gate_last in itertools.product(functions, (False, True)):
            yield GatedParts(tuple(ups), down, activation, gate_last)


def _are_halves(ups: list[PackedLinear], width: int) -> bool:
    """Return whether gate and value, each of `width` features, are side by side in `ups`."""
    if not ups or any(up.group is not ups[0].group for up in ups):
        return False
    indices = [up.index for up in ups]
    side_by_side = indices == list(range(indices[0], indices[0] + len(indices)))
    return side_by_side and sum(up.out_features for up in ups) == 2 * width and width % PANEL_FEATURES == 0


def _build_mixer_layer(layer: nn.Module, parts: LayerParts) -> FusedMixerLayer:
    fused: FusedMixerLayer = fused_layer(
        FusedMixerLayer, layer, _parts=parts, _names=_names(layer), _bound=None
    )
    return fused


def _error(layer: nn.Module, parts: LayerParts, expected: tuple[Tensor, ...]) -> float:
    shadow = Shadow(layer)
    with torch.no_grad(), shadow.running():
        outputs, _ = prompt_and_token(_build_mixer_layer(shadow.module, parts))
    comparison = compare(outputs, expected, check_dtype=True)  # its residual stream may have more bits
    return comparison.most if parts.chooses else comparison.worst  # rounding may choose another expert


def _outputs(layer: nn.Module) -> tuple[tuple[Tensor, ...], int] | Refusal:
    shadow = Shadow(layer)
    with torch.no_grad(), shadow.running():
        ran: tuple[tuple[Tensor, ...], int] | Refusal = call_foreign(prompt_and_token, shadow.module)
    return ran


def prompt_and_token(layer: Any) -> tuple[tuple[Tensor, ...], int]:
    """Return the change of a padded prompt, and of the token after it, by a layer; and the number of `None`s after its output."""
    mixer: Any = next(child for child in layer.children() if isinstance(child, FusedMixer))
    last = mixer.get_submodule(mixer.last)
    generator = torch.Generator().manual_seed(0)
    size = (_BATCH, _TOKENS + 1, last.out_features)
    states = torch.randn(size, generator=generator).to(last.weight_dtype)
    example = mixer.example(_BATCH, _TOKENS, _PADDING)
    given: dict[str, Any] = {}
    if "position_embeddings" in _names(layer):  # read by another kind of its layers
        given["position_embeddings"] = None
    first, then = (
        with_its_cache_name(_names(layer), {**given, **named}) for named in (example.prompt, example.token)
    )
    prompt, nones = _hidden_states(layer(states[:, :_TOKENS], **first))
    token, _ = _hidden_states(layer(states[:, _TOKENS:], **then))
    return ((prompt - states[:, :_TOKENS])[example.tokens], token - states[:, _TOKENS:]), nones


def _hidden_states(output: Any) -> tuple[Tensor, int]:
    """Return the hidden states, and the number of `None`s after them.

    Raises:
        TypeError: the output is something else.
    """
    states, *more = output if isinstance(output, tuple) else (output,)
    if not isinstance(states, Tensor) or any(part is not None for part in more):
        raise TypeError("it returns more than hidden states")
    return states, len(more)


def _names(layer: Any) -> tuple[str, ...]:
    own = getattr(layer, "_original_class", type(layer))
    return tuple(parameters_of(own.forward))
