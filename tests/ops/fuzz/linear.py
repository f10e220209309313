"""linear, linear_split, quantize_int4 and pack_rotated."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hf_cpu_accel.ops.linear import ACTIVATIONS, linear_reference, linear_split_reference
from hf_cpu_accel.packing.linear import (
    PackedWeight,
    int4,
    pack_linear,
    shapes_of,
)
from hf_cpu_accel.packing.rotated import pack_rotated_reference
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call
from tests.ops.linear_cases import BOUND
from tests.ops.test_quantize import values


def packed(rng: random.Random, rows: int, columns: int) -> PackedWeight:
    return pack_linear(torch.randn(rows, columns) / columns**0.5, rng.choice(list(BOUND)))


def bound_of(weight: PackedWeight, *tensors: Tensor) -> float:
    """BOUND is that of the op against float64, which the reference has for itself."""
    return 2 * BOUND[weight.dtype] + draw.rounding(*tensors)


def before_activation(bound: float, activation: str) -> float:
    """Bounds are relative to the largest value: that is 1 behind a tanh, of sums that are several times as large."""
    return bound * (8 if activation == "tanh" else 1)


def linear(rng: random.Random) -> Call:
    out_features, x = draw.size(rng), draw.rows(rng, rng.choice((draw.size(rng), draw.size(rng, 600))))
    weight = packed(rng, out_features, x.shape[-1])
    residual = draw.laid_out(rng, torch.randn(*x.shape[:-1], out_features)) if rng.random() < 0.4 else None
    activation = rng.choice(list(ACTIVATIONS))
    bias = draw.vector(rng, out_features)
    arguments = [x, weight.data, weight.scale, bias, residual, out_features, activation]
    return Call("linear", arguments, linear_reference, before_activation(bound_of(weight, x), activation))


def linear_split(rng: random.Random) -> Call:
    sizes = [32 * rng.randint(1, 4) for _ in range(rng.randint(0, 3))] + [draw.size(rng)]
    x = draw.rows(rng, draw.size(rng))
    weight = packed(rng, sum(sizes), x.shape[-1])
    arguments = [x, weight.data, weight.scale, draw.vector(rng, sum(sizes)), sizes]
    return Call("linear_split", arguments, linear_split_reference, bound_of(weight, x))


def quantize_int4(rng: random.Random) -> Call:
    group = rng.choice(int4.GROUPS)
    weight = torch.randn(draw.size(rng, 40), group * rng.randint(1, 5)) * 10 ** rng.uniform(-3, 3)
    return Call("quantize_int4", [weight, group], int4.quantize, alike=_as_good)


def _as_good(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Where two choices are equally good they may differ; sums are of the own choice."""
    if not ours[0].numel() or not ours[2].isfinite().all():
        return
    assert torch.equal(values(ours[0], ours[1], torch.ones_like(ours[2])).sum(1), ours[2][1])
    torch.testing.assert_close(ours[2][0], theirs[2][0])


def pack_rotated(rng: random.Random) -> Call:
    group = rng.choice((0, *int4.GROUPS))
    weight = torch.randn(draw.size(rng), draw.size(rng)).to(rng.choice((torch.float32, torch.bfloat16)))
    dtype = "int4" if group else "int8"
    shapes = shapes_of(*weight.shape, dtype, int4_group=group or 32)
    data, scale = (torch.zeros(shape, dtype=kind) for shape, kind in shapes)
    return Call(
        "pack_rotated", [weight, group, data, scale], pack_rotated_reference, written=(2, 3), alike=_any
    )


def _any(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """What is written is for `test_quantize` to compare: a choice between equally good values may differ."""


FAMILY = (linear, linear, linear, linear_split, quantize_int4, pack_rotated)
