"""Possible structures of an encoder layer, from a trace of one forward: the places of its norms, and the activation of the FFN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from hf_cpu_accel.rewrite.encoder.parts import EncoderLayerParts, are_adjacent
from hf_cpu_accel.rewrite.encoder.trace import LayerTrace
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import identify_norm


def candidates(layer: nn.Module, trace: LayerTrace) -> Iterator[EncoderLayerParts]:
    """Yield the possible parts of a layer with this trace; the values decide which is right (see `match`)."""
    call = trace.attention[0]
    if call is None:
        return
    width = call.heads * call.head_size
    offsets = sorted(part.offset for part in (call.query, call.key, call.value))
    made = {part.linear for part in (call.query, call.key, call.value)}
    before, rest = trace.linears[: len(made)], trace.linears[len(made) :]
    if set(before) != made or not are_adjacent(tuple(made)) or len(rest) not in (3, 4):
        return
    whole = sum(linear.out_features for linear in made) == 3 * width
    if not whole or [offset - offsets[0] for offset in offsets] != [0, width, 2 * width]:
        return
    output, *up, down = rest
    gated = len(up) == 2 or up[0].out_features == 2 * down.in_features
    if len(up) == 2 and not (are_adjacent(tuple(up)) and up[0].out_features == up[1].out_features):
        return
    up.sort(key=lambda linear: linear.index)
    specs = [(norm, identify_norm(norm)) for norm in trace.norms]
    norms = [(norm, spec) for norm, spec in specs if spec is not None]
    if len(norms) not in (1, 2):
        return
    scales = (call.head_size**-0.5, 1.0) if call.scale is None else (call.scale,)
    gains = layer_scale_of(layer)
    ways = [(False, False), (True, False), *([(True, True)] if gains else [])]
    for scale, activation, (pre_norm, bounded) in itertools.product(scales, trace.activations, ways):
        if len(norms) == 2 or pre_norm:
            yield EncoderLayerParts(
                attention=replace(call, bias=None),
                scale=scale,
                output=output,
                attention_norm=norms[0] if len(norms) == 2 else None,
                up=tuple(up),
                down=down,
                ffn_norm=norms[-1],
                activation=activation,
                gated=gated,
                pre_norm=pre_norm,
                layer_scale=gains if pre_norm else None,
                bounded_scale=bounded,
            )


def layer_scale_of(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Return LayerScale: the two vectors of parameters that belong to no linear and no norm, or None. A single number applies to
    all features."""
    theirs = known_parameters(layer)
    vectors = [p for p in layer.parameters() if id(p) not in theirs and p.dim() == 1]
    return (vectors[0], vectors[1]) if len(vectors) == 2 else None


def unexplained(layer: nn.Module, parts: EncoderLayerParts) -> str | None:
    """Return the path of a parameter that the parts do not explain, or None: a few random tokens may not show its effect."""
    known = known_parameters(layer) | {id(gain) for gain in layer_scale_of(layer) or ()}
    for path, p in layer.named_parameters():
        is_table = parts.relative is not None and p.dim() == 2 and p.shape[1] == parts.attention.heads
        if id(p) not in known and not is_table:
            return path
    return None


def known_parameters(layer: nn.Module) -> set[int]:
    known = [m for m in layer.modules() if isinstance(m, PackedLinear) or identify_norm(m) is not None]
    return {id(p) for module in known for p in module.parameters(recurse=False)}


def set_layer_scale_about_one(layer: nn.Module) -> None:
    """Set the gains of a shadow close to 1, since real ones may be too small to show the branches."""
    for number, gain in enumerate(layer_scale_of(layer) or ()):
        generator = torch.Generator().manual_seed(number)
        values = 1 + 0.3 * torch.randn(gain.shape, generator=generator).to(gain.dtype)
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is gain:
                    module._parameters[name] = nn.Parameter(values, requires_grad=False)
