"""quantize_int4 against its reference, and against all multipliers that there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.ops.quantize import quantize_int4
from hf_cpu_accel.packing.linear import int4

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
        quantised = [values(*found) for found in (ours, reference)]
        assert (
            torch.isclose(*quantised).float().mean() > 0.99
        )  # not the indices: levels may be negative with either sign
        errors = [(found - weight).square().sum(1) for found in quantised]
        torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-12)


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
    with pytest.raises(ValueError, match="group=16: accepted are 32, 64, 128"):
        quantize_int4(torch.randn(4, 64), 16)
    with pytest.raises(ValueError, match="whole groups of 64"):
        quantize_int4(torch.randn(4, 96), 64)
