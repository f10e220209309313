"""Checks that the parts of a decoder layer fit."""

from __future__ import annotations

from hf_cpu_accel.abi import GATE_ACTIVATIONS, NORM_KINDS, SCORINGS
from hf_cpu_accel.ops.decoder.parts import (
    CrossAttention,
    DecoderLayer,
    FeedForward,
    Gate,
    Heads,
    MixtureOfExperts,
    Norm,
    PerLayerInput,
    Projection,
    SelfAttention,
)
from hf_cpu_accel.ops.decoder.recurrence import check_recurrence
from hf_cpu_accel.ops.experts import MAX_TOP_K
from hf_cpu_accel.ops.linear import check_activation
from hf_cpu_accel.packing.linear import PANEL_FEATURES


def check_layer(layer: DecoderLayer, features: int) -> None:
    _check_attention(layer.attention, features)
    if isinstance(layer.ffn, MixtureOfExperts):
        _check_mixture(layer.ffn, features)
    elif layer.ffn is not None:
        _check_ffn(layer.ffn, features)
    elif layer.parallel or layer.ffn_norm or layer.ffn_post_norm or layer.ffn_out_norm:
        raise ValueError("ffn=None: parallel must be False, and its norms None")
    if layer.parallel and (layer.attention_out_norm or layer.ffn_out_norm or layer.cross):
        raise ValueError("parallel=True: attention_out_norm, ffn_out_norm and cross must be None")
    if layer.per_layer:
        _check_per_layer(layer.per_layer, features)
    if layer.ffn is None and (layer.per_layer or layer.output_scale != 1):
        raise ValueError("ffn=None: per_layer must be None, and output_scale 1")
    if layer.output_scale != 1 and layer.ffn_out_norm:
        raise ValueError(f"output_scale={layer.output_scale}: ffn_out_norm must be None")
    if layer.cross:
        _check_cross(layer.cross, features)
    elif layer.cross_norm or layer.cross_out_norm:
        raise ValueError("cross=None: cross_norm and cross_out_norm must be None")
    if layer.recurrence:
        check_recurrence(layer.recurrence, features, layer.attention.heads * layer.attention.value_dim)
        if layer.cross:
            raise ValueError("a layer with a recurrence: cross must be None")
    for name, part in vars(layer).items():
        if name.endswith("_norm"):
            _check_norm(name, part, [(features,)])


def _check_attention(attention: SelfAttention, features: int) -> None:
    _check_heads(attention)
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    _check_projection("qkv", attention.qkv, features, None)
    _check_projection("output", attention.output, heads * attention.value_dim, features)
    _check_place("query", attention.query, head_dim, attention)
    _check_place("key", attention.key, head_dim, attention, group=1)
    _check_place("value", attention.value, attention.value_dim, attention, group=1)
    if attention.gate is not None:
        _check_gate(attention.gate, attention)
    if attention.window is not None and attention.window < 1:
        raise ValueError(f"window={attention.window}: must be at least 1, or None")
    if attention.softcap is not None and not attention.softcap > 0:
        raise ValueError(f"softcap={attention.softcap}: must be positive, or None")
    if attention.rotary_dim % 2 or not 0 <= attention.rotary_dim <= head_dim or attention.rotary < 0:
        raise ValueError(
            f"rotary_dim={attention.rotary_dim}, rotary={attention.rotary}: rotary_dim must be even and at most "
            f"head_dim={head_dim}, and rotary the index of a table"
        )
    for name in ("sinks", "alibi"):
        vector = getattr(attention, name)
        if vector is not None and vector.shape != (heads,):
            raise ValueError(f"{name} of shape {tuple(vector.shape)}: must be ({heads},), one per head")
    relative = attention.relative
    if relative is not None and (relative.dim() != 2 or relative.shape[0] != heads or not relative.shape[1]):
        raise ValueError(
            f"relative of shape {tuple(relative.shape)}: must be ({heads}, at least one distance)"
        )
    for name, count, dim in (
        ("query_norm", heads, head_dim),
        ("key_norm", kv_heads, head_dim),
        ("value_norm", kv_heads, attention.value_dim),
        ("sub_norm", heads, attention.value_dim),
    ):
        _check_norm(name, getattr(attention, name), [(dim,), (count, dim), (count * dim,)])


def _check_gate(gate: Gate, attention: SelfAttention) -> None:
    if gate.activation not in GATE_ACTIVATIONS[1:]:
        raise ValueError(
            f"activation={gate.activation!r} of the gate: must be one of {', '.join(GATE_ACTIVATIONS[1:])}"
        )
    if gate.dim not in (1, attention.value_dim):
        raise ValueError(f"dim={gate.dim} of the gate: must be 1 or value_dim={attention.value_dim}")
    _check_place("gate", gate.heads, gate.dim, attention)


def _check_place(
    name: str, place: Heads, width: int, attention: SelfAttention, group: int | None = None
) -> None:
    """Args: group: heads for each of the key's; None for as many as there are of the query."""
    group = attention.heads // attention.kv_heads if group is None else group
    end = (
        place.first + (attention.kv_heads - 1) * place.group_stride + (group - 1) * place.head_stride + width
    )
    if group > 1 and place.head_stride == 0:
        raise ValueError(f"{name}={place}: head_stride is required where {group} heads share a key")
    if min(place.first, place.group_stride, place.head_stride) < 0 or end > attention.qkv.weight.out_features:
        raise ValueError(
            f"{name}={place}: spans features {place.first} to {end}, but qkv has {attention.qkv.weight.out_features} features"
        )


def _check_cross(cross: CrossAttention, features: int) -> None:
    _check_heads(cross)
    _check_projection("query of cross", cross.query, features, cross.heads * cross.head_dim)
    _check_projection("output of cross", cross.output, cross.heads * cross.value_dim, features)


def _check_heads(attention: SelfAttention | CrossAttention) -> None:
    sizes = {name: getattr(attention, name) for name in ("heads", "kv_heads", "head_dim", "value_dim")}
    if min(sizes.values()) < 1 or attention.heads % attention.kv_heads:
        raise ValueError(
            f"{', '.join(f'{name}={size}' for name, size in sizes.items())}: "
            "all must be at least 1, and heads a multiple of kv_heads"
        )


def _check_ffn(ffn: FeedForward, features: int) -> None:
    check_activation(ffn.activation)
    intermediate = ffn.down.weight.in_features
    if ffn.gated and intermediate % PANEL_FEATURES:
        raise ValueError(
            f"gated FFN with {intermediate} intermediate features: must be a multiple of {PANEL_FEATURES}"
        )
    _check_projection("up", ffn.up, features, 2 * intermediate if ffn.gated else intermediate)
    _check_projection("down", ffn.down, intermediate, features)
    _check_norm("sub_norm", ffn.sub_norm, [(intermediate,)])


def _check_per_layer(own: PerLayerInput, features: int) -> None:
    check_activation(own.activation)
    _check_projection("gate of per_layer", own.gate, features, None)
    _check_projection("output of per_layer", own.output, own.gate.weight.out_features, features)
    _check_norm("post_norm of per_layer", own.post_norm, [(features,)])


def _check_mixture(mixture: MixtureOfExperts, features: int) -> None:
    mixture.experts.check()
    experts = mixture.experts.experts
    if mixture.experts.features != features:
        raise ValueError(f"experts of {mixture.experts.features} features: must be {features}")
    if not 1 <= mixture.top_k <= min(experts, MAX_TOP_K):
        raise ValueError(f"top_k={mixture.top_k}: must be 1 to {min(experts, MAX_TOP_K)}")
    if mixture.scoring not in SCORINGS:
        raise ValueError(f"scoring={mixture.scoring!r}: must be one of {', '.join(SCORINGS)}")
    if mixture.choice_bias is not None and mixture.choice_bias.shape != (experts,):
        raise ValueError(
            f"choice_bias of shape {tuple(mixture.choice_bias.shape)}: must be ({experts},), one per expert"
        )
    if mixture.shared_gate and mixture.shared is None:
        raise ValueError("shared_gate=True: requires a shared expert")
    _check_projection("router", mixture.router, features, experts + mixture.shared_gate)
    if mixture.shared is not None:
        if mixture.shared.sub_norm is not None:
            raise ValueError("sub_norm of a shared expert: must be None")
        _check_ffn(mixture.shared, features)


def _check_projection(name: str, projection: Projection, in_features: int, out_features: int | None) -> None:
    weight = projection.weight
    out_features = weight.out_features if out_features is None else out_features
    if (weight.in_features, weight.out_features) != (in_features, out_features):
        raise ValueError(
            f"{name} is {weight.out_features} x {weight.in_features}: must be {out_features} x {in_features}"
        )
    if projection.bias is not None and projection.bias.shape != (out_features,):
        raise ValueError(f"bias of {name} of shape {tuple(projection.bias.shape)}: must be ({out_features},)")


def _check_norm(name: str, norm: Norm | None, shapes: list[tuple[int, ...]]) -> None:
    if norm is None:
        return
    if norm.kind not in NORM_KINDS[1:]:
        raise ValueError(f"kind={norm.kind!r} of {name}: must be one of {', '.join(NORM_KINDS[1:])}")
    for part, tensor in (("weight", norm.weight), ("bias", norm.bias)):
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"{part} of {name} of shape {tuple(tensor.shape)}: must be {' or '.join(map(str, shapes))}"
            )
    if norm.kind == "rms_norm" and norm.bias is not None:
        raise ValueError(f"{name} is an rms_norm with a bias: rms_norm has none")
    if norm.weight is not None and norm.bias is not None and norm.weight.shape != norm.bias.shape:
        raise ValueError(f"weight and bias of {name} must have the same shape")
