"""The arguments of `decoder_layers` for a layer with a recurrence instead of attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_cpu_accel.ops.decoder.parts import Heads, Projection, Recurrence, SelfAttention

KINDS = ("none", "short_convolution", "gated_delta_net", "state_space", "selective_scan")
RECURRENCE_PROJECTIONS = ("rest", "selected", "steps")

_PLACES = ("conv_input", "conv_gate", "gate", "decay", "beta")
_SIZES = ("heads", "key_heads", "key_dim", "value_dim")
_NORMS = ("dt_norm", "B_norm", "C_norm")
_VECTORS = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm_weight", *_NORMS)

# Columns of `bind.LAYOUT`, in the order of RecurrenceLayout of csrc/decoder/layout.h; all 0 where the layer attends.
RECURRENCE = tuple(
    f"recurrence_{name}"
    for name in (
        *("kind", "channels", "taps", "conv_weight", "conv_bias", *_PLACES, *_SIZES),
        *("A_log", "dt_bias", "D", "norm_weight", "norm_groups", "gate_first"),
        *(f"{name}{part}" for name in RECURRENCE_PROJECTIONS for part in ("", "_scale", "_bias")),
        *("rest_features", "selected_features", *_NORMS),
    )
)


def integers_of(recurrence: Recurrence, vector: Callable[[Tensor | None], int]) -> dict[str, int]:
    """Return the integers of `RECURRENCE` for a layer, except its projections.

    Args:
        vector: gives where a tensor begins in the op's vectors.
    """
    channels, _, taps = recurrence.conv_weight.shape
    names = (*_PLACES, *_SIZES, "norm_groups", "gate_first")
    values = {name: int(getattr(recurrence, name)) for name in names}
    values |= {name: vector(getattr(recurrence, name)) for name in _VECTORS}
    values |= {"kind": KINDS.index(recurrence.op), "channels": channels, "taps": taps}
    for name in ("rest", "selected"):
        projection: Projection | None = getattr(recurrence, name)
        values[f"{name}_features"] = 0 if projection is None else projection.weight.out_features
    return {f"recurrence_{name}": value for name, value in values.items()}


def projections_around(qkv: Projection, output: Projection) -> SelfAttention:
    """Return `DecoderLayer.attention` for a layer with a recurrence."""
    place = Heads(0, 0)
    return SelfAttention(qkv, 1, 1, 1, output.weight.in_features, place, place, place, 1.0, output)


def check_recurrence(recurrence: Recurrence, features: int, columns: int) -> None:
    """
    Args:
        features: of the hidden states.
        columns: that the layer's last projection takes.

    Raises:
        ValueError: its parts do not fit one another.
    """
    if recurrence.op not in KINDS[1:]:
        raise ValueError(f"op={recurrence.op!r} of recurrence: must be one of {', '.join(KINDS[1:])}")
    rest, channels = recurrence.rest, len(recurrence.conv_weight)
    if rest is not None and rest.weight.in_features != features:
        raise ValueError(
            f"rest of recurrence has {rest.weight.in_features} input features: must be {features}"
        )
    given = recurrence.heads * recurrence.value_dim
    keys = 2 * recurrence.key_heads * recurrence.key_dim
    if recurrence.op in ("short_convolution", "selective_scan"):
        given, keys = channels, 0
    if recurrence.op == "selective_scan":
        _check_scan(recurrence, channels)
    if (given, given + keys) != (columns, channels):
        raise ValueError(
            f"recurrence of {channels} channels returns {given} features, with {keys} of keys: "
            f"the output projection has {columns} input features"
        )


def _check_scan(recurrence: Recurrence, channels: int) -> None:
    selected, steps = recurrence.selected, recurrence.steps
    if selected is None or steps is None or recurrence.rest is not None:
        raise ValueError("a selective scan requires selected and steps, and rest=None")
    rank = selected.weight.out_features - 2 * recurrence.key_dim
    sizes = (selected.weight.in_features, steps.weight.in_features, steps.weight.out_features)
    if sizes != (channels, rank, channels) or rank < 1:
        raise ValueError(
            f"selected and steps of a selective scan have {sizes} features: must be {(channels, rank, channels)}"
        )
