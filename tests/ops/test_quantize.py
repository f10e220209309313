"""quantize_int4 and pack_rotated against their references; quantize_int4 also against all multipliers that there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.quantize import quantize_int4
from hf_cpu_accel.packing.linear import (
    PackedWeight,
    int4,
    shapes_of,
    unpack_linear,
    unpack_values,
)
from hf_cpu_accel.packing.rotated import pack_rotated_reference

LEVELS = torch.tensor(int4.LEVELS, dtype=torch.float32)


def values(index: Tensor, multiplier: Tensor, scale: Tensor) -> Tensor:
    levels = LEVELS[index.int()].unflatten(1, (multiplier.shape[1], -1))
    return (levels * multiplier[..., None]).flatten(1) * scale[0, :, None]


def check_quantize(seed: int = 0) -> None:
    """The kernel against the reference; where two choices are equally good they may differ. Raises AssertionError."""
    generator = torch.Generator().manual_seed(seed)
    for rows, columns, group in ((1, 32, 32), (5, 192, 64), (33, 256, 128), (64, 512, 32)):
        weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
        weight[0, : columns // 2] = 0
        ours, reference = quantize_int4(weight, group), int4.quantize(weight, group)
        assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in reference]
        torch.testing.assert_close(ours[2][0], reference[2][0])
        integers = values(ours[0], ours[1], torch.ones_like(ours[2]))
        assert torch.equal(integers.sum(1), ours[2][1])
        quantized = [values(*found) for found in (ours, reference)]
        assert (
            torch.isclose(*quantized).float().mean() > 0.99
        )  # not the indices: levels may be negative with either sign
        errors = [(found - weight).square().sum(1) for found in quantized]
        torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-12)
    for shape in ((1, 1), (5, 3), (32, 128), (33, 131), (70, 700), (64, 4224)):
        for group in (0, 32, 128):
            for dtype in (torch.float32, torch.bfloat16):
                check_pack(torch.randn(shape, generator=generator).to(dtype), group)


def check_pack(weight: Tensor, group: int) -> None:
    """pack_rotated against its reference, which sums in another order; where two choices are equally good they may differ."""
    weight[0] = 0
    dtype, rows = "int4" if group else "int8", len(weight)
    ours, reference = (_unwritten(weight, dtype, group) for _ in range(2))
    torch.ops.hf_cpu_accel.pack_rotated(weight, group, ours.data, ours.scale)
    pack_rotated_reference(weight, group, reference.data, reference.scale)
    assert ours.scale is not None
    assert reference.scale is not None
    torch.testing.assert_close(ours.scale[0], reference.scale[0])
    # With what lies behind the last feature and below the last row: zeros.
    whole = PackedWeight(ours.data, None, _padded(weight.shape[1], group), 32 * len(ours.data), dtype)
    integers = unpack_values(whole).float()
    assert not integers[rows:].any()
    assert not integers[:, weight.shape[1] :].any()
    assert torch.equal(integers.sum(1)[:rows], ours.scale[1])
    found, expected = unpack_linear(ours), unpack_linear(reference)
    assert ((found - expected).abs() < 1e-6 + 1e-4 * expected.abs().max()).float().mean() > 0.99
    error = [(values - weight.float()).square().sum() for values in (found, expected)]
    torch.testing.assert_close(*error, rtol=1e-2, atol=1e-9)


def _unwritten(weight: Tensor, dtype: str, group: int) -> PackedWeight:
    rows, columns = weight.shape
    (shape, kind), (scale, _) = shapes_of(rows, columns, dtype, int4_group=group or 32)
    data = torch.full(shape, 77, dtype=kind)
    return PackedWeight(data, torch.full(scale, torch.nan), columns, rows, dtype)


def _padded(columns: int, group: int) -> int:
    return -(-columns // (group or 4)) * (group or 4)


def test_quantize() -> None:
    check_quantize()


@pytest.mark.parametrize("group", int4.GROUPS)
def test_no_other_multiplier_is_much_better(group: int) -> None:
    weight = torch.randn(16, 512)
    index, multiplier, scale = quantize_int4(weight, group)
    steps = (weight / scale[0, :, None]).unflatten(1, (-1, group, 1))
    error = (values(index, multiplier, scale) - weight).square().sum() / scale[0].square().mean()
    least = torch.full(steps.shape[:2], torch.inf)
    for candidate in range(-int4.LARGEST_MULTIPLIER, int4.LARGEST_MULTIPLIER + 1):
        nearest = (steps - LEVELS * candidate).abs().amin(3)
        least = torch.minimum(least, nearest.square().sum(2))
    assert error <= 1.02 * (least.sum(1) * scale[0].square()).sum() / scale[0].square().mean()


def test_opcheck_and_bad_arguments() -> None:
    torch.library.opcheck(torch.ops.hf_cpu_accel.quantize_int4, (torch.randn(5, 64), 32))
    with pytest.raises(ValueError, match="group=16: expected one of 32, 64, 128"):
        quantize_int4(torch.randn(4, 64), 16)
    with pytest.raises(ValueError, match="whole groups of 64"):
        quantize_int4(torch.randn(4, 96), 64)
    weight = _unwritten(torch.randn(40, 65), "int4", 64)
    arguments = (torch.randn(40, 65), 64, weight.data, weight.scale)
    torch.library.opcheck(torch.ops.hf_cpu_accel.pack_rotated, arguments)
    for place, wrong in enumerate((torch.randn(41, 65), 48, weight.data[:1], torch.ones(2, 41))):
        with pytest.raises((RuntimeError, ValueError), match=r"pack_rotated|group=48"):
            torch.ops.hf_cpu_accel.pack_rotated(*arguments[:place], wrong, *arguments[place + 1 :])
