"""How a layer with a recurrence in the place of attention is written down for `decoder_layers`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_cpu_accel.ops.decoder.parts import Heads, Projection, Recurrence, SelfAttention

KINDS = ("none", "short_convolution", "gated_delta_net", "state_space")

_PLACES = ("conv_input", "conv_gate", "gate", "decay", "beta")
_SIZES = ("heads", "key_heads", "key_dim", "value_dim")
_VECTORS = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm_weight")

# Columns of `bind.LAYOUT`, in the order of RecurrenceLayout of csrc/decoder/layout.h; all 0 where the layer attends.
RECURRENCE = tuple(
    f"recurrence_{name}"
    for name in (
        *("kind", "channels", "taps", "conv_weight", "conv_bias", *_PLACES, *_SIZES),
        *("A_log", "dt_bias", "D", "norm_weight", "norm_groups", "gate_first"),
        *("rest", "rest_scale", "rest_bias", "rest_features"),
    )
)


def integers_of(recurrence: Recurrence, vector: Callable[[Tensor | None], int]) -> dict[str, int]:
    """What `RECURRENCE` has of it, but for `rest`.

    Args:
        vector: gives where a tensor begins in the op's vectors.
    """
    channels, _, taps = recurrence.conv_weight.shape
    names = (*_PLACES, *_SIZES, "norm_groups", "gate_first")
    values = {name: int(getattr(recurrence, name)) for name in names}
    values |= {name: vector(getattr(recurrence, name)) for name in _VECTORS}
    values |= {"kind": KINDS.index(recurrence.op), "channels": channels, "taps": taps}
    values["rest_features"] = 0 if recurrence.rest is None else recurrence.rest.weight.out_features
    return {f"recurrence_{name}": value for name, value in values.items()}


def projections_around(qkv: Projection, output: Projection) -> SelfAttention:
    """What `DecoderLayer.attention` is in a layer with a recurrence."""
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
        raise ValueError(f"rest of recurrence takes {rest.weight.in_features} features: must be {features}")
    given = recurrence.heads * recurrence.value_dim
    keys = 2 * recurrence.key_heads * recurrence.key_dim
    if recurrence.op == "short_convolution":
        given, keys = channels, 0
    if (given, given + keys) != (columns, channels):
        raise ValueError(
            f"recurrence of {channels} channels gives {given} features beside {keys} of keys: "
            f"the output projection takes {columns}"
        )
