"""The arguments of `decoder_layers` for a layer with a recurrence instead of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_cpu_accel.abi import RECURRENCE_KINDS, ProjectionLayout, RecurrenceLayout
from hf_cpu_accel.ops.decoder.parts import Heads, Projection, Recurrence, SelfAttention

_NUMBERS = (
    *("conv_input", "conv_gate", "gate", "decay", "beta"),
    *("heads", "key_heads", "key_dim", "value_dim", "norm_groups", "gate_first"),
)
_VECTORS = ("conv_weight", "conv_bias", "A_log", "dt_bias", "D", "norm_weight", "dt_norm", "B_norm", "C_norm")
_PROJECTIONS = ("rest", "selected", "steps")


def layout_of(
    recurrence: Recurrence,
    vector: Callable[[Tensor | None], int],
    projection: Callable[[Projection | None], ProjectionLayout],
) -> RecurrenceLayout:
    """Return the layout of a recurrence.

    Args:
        vector: returns the first element of a tensor in the op's vectors.
        projection: returns the layout of a projection.
    """
    channels, _, taps = recurrence.conv_weight.shape
    rest, selected = recurrence.rest, recurrence.selected
    parts: dict[str, Any] = {
        **{name: int(getattr(recurrence, name)) for name in _NUMBERS},
        **{name: vector(getattr(recurrence, name)) for name in _VECTORS},
        **{name: projection(getattr(recurrence, name)) for name in _PROJECTIONS},
    }
    return RecurrenceLayout(
        kind=RECURRENCE_KINDS.index(recurrence.op),
        channels=channels,
        taps=taps,
        rest_features=0 if rest is None else rest.weight.out_features,
        selected_features=0 if selected is None else selected.weight.out_features,
        **parts,
    )


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
    if recurrence.op not in RECURRENCE_KINDS[1:]:
        raise ValueError(
            f"op={recurrence.op!r} of recurrence: must be one of {', '.join(RECURRENCE_KINDS[1:])}"
        )
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
