"""Packed weights whose output features are put in another order are, byte for byte, those of the weight in that order."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel.packing.affine import quantize
from hf_cpu_accel.packing.linear import FORMS, pack_affine, pack_linear, unpack_linear
from hf_cpu_accel.packing.row_order import in_order

SHAPES = [(1, 1), (32, 4), (33, 5), (70, 129), (64, 768), (96, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMS)
def test_bytes_are_those_of_the_weight_in_that_order(shape: tuple[int, int], dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, order = torch.randn(shape, generator=generator), torch.randperm(shape[0], generator=generator)
    packed = in_order(pack_linear(weight, dtype), order)
    expected = pack_linear(weight[order], dtype)
    assert torch.equal(packed.data, expected.data)
    assert (packed.scale is None) is (expected.scale is None)
    assert packed.scale is None or torch.equal(packed.scale, expected.scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("half", [False, True])
def test_scales_of_affine_groups_go_along(half: bool) -> None:
    weight, order = quantize(torch.randn(70, 130), 4, 32), torch.randperm(70)
    packed = pack_affine(weight, half=half)
    assert torch.equal(unpack_linear(in_order(packed, order)), unpack_linear(packed)[order])


def test_a_part_is_ordered_alone() -> None:
    packed = pack_linear(torch.randn(96, 64), "int4")
    part, order = packed.narrow(32, 40), torch.randperm(40)
    assert torch.equal(unpack_linear(in_order(part, order)), unpack_linear(part)[order])
    assert torch.equal(unpack_linear(in_order(in_order(part, order), order.argsort())), unpack_linear(part))
