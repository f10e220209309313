"""Affine groups: the order of bytes, the search, and exactness."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel.packing import affine
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.linear import concat, dtype_of, pack_affine, pack_linear, shapes_of, unpack_linear


def random_groups(rows: int, columns: int, bits: int, group: int, *, half: bool = True) -> AffineGroups:
    generator = torch.Generator().manual_seed(rows * columns + group)
    shape = (rows, -(-columns // group))
    q = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    scale, offset = (torch.randn(shape, generator=generator) for _ in range(2))
    if half:
        scale, offset = scale.half().float(), offset.half().float()
    return AffineGroups(q, scale, offset, bits, group)


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_where_the_kernels_look_for_them(bits: int) -> None:
    weight = random_groups(64, 128, bits, 32)
    data = affine.pack(weight)
    assert data.shape == affine.shape_of(64, 128, bits, 32, half=True)
    assert dtype_of(data) == weight.dtype == f"affine{bits}"
    flat = data.view(2, 4, -1)
    for feature, k in ((0, 0), (40, 77), (63, 127), (5, 68)):
        panel, column, group, rest = feature // 32, feature % 32, k // 32, k % 32
        header = flat[panel, group, :128].view(torch.float16)
        assert header[column] == weight.scale[feature, group]
        assert header[32 + column] == weight.offset[feature, group]
        if bits == 8:
            assert flat[panel, group, 128 + rest // 4 * 128 + column * 4 + rest % 4] == weight.q[feature, k]
            continue
        byte = int(flat[panel, group, 128 + rest // 8 * 128 + column * 4 + rest % 4])
        assert (byte >> 4 if rest % 8 >= 4 else byte & 15) == weight.q[feature, k]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 192])
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (64, 192), (70, 400), (3, 0), (0, 64)], ids=str)
def test_unpacking_gives_what_was_packed(shape: tuple[int, int], group: int, bits: int, half: bool) -> None:
    weight = random_groups(*shape, bits, group, half=half)
    packed = pack_affine(weight)
    again = affine.unpack(packed.data, packed.out_features, packed.in_features)
    assert (again.bits, again.group) == (bits, group)
    for name in ("q", "scale", "offset"):
        assert torch.equal(getattr(again, name), getattr(weight, name)), name
    assert torch.equal(unpack_linear(packed), weight.dequantize())
    # Float32 where float16 would round.
    assert affine.form_of(packed.data)[2] == (half or 0 in shape)


def test_shapes_are_those_of_packing() -> None:
    for dtype in affine.BITS:
        packed = pack_linear(torch.randn(70, 100), dtype, int4_group=64)
        assert shapes_of(70, 100, dtype, int4_group=64) == [(tuple(packed.data.shape), torch.uint8)]


def test_the_search_finds_the_grid_on_which_a_weight_lies() -> None:
    """Of a dequantized Q4_1 file: all 16 levels are used, or a few at the ends are not."""
    weight = random_groups(64, 256, 4, 32)
    found = affine.quantize(weight.dequantize(), 4, 32)
    error = (found.dequantize() - weight.dequantize()).abs().max()
    assert error <= 1e-3 * weight.dequantize().abs().max()


def test_the_search_is_no_worse_than_the_range_from_least_to_largest() -> None:
    weight = torch.randn(64, 256)
    groups = weight.view(64, -1, 32)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    plain = (((groups - least) / step).round() * step + least).view_as(weight)
    assert (pack_error := (unpack_linear(pack_linear(weight, "affine4")) - weight).norm()) <= 1.001 * (
        plain - weight
    ).norm(), pack_error


def test_a_finer_form_is_the_same_weight() -> None:
    weight = random_groups(32, 100, 4, 64)
    for bits, group in ((8, 64), (4, 16), (8, 32)):
        assert torch.equal(weight.regroup(bits, group).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="would round 4 bits in groups of 64"):
        weight.regroup(4, 128)


def test_parts_side_by_side_are_one_weight() -> None:
    parts = [pack_affine(random_groups(rows, 96, 4, 32)) for rows in (64, 32, 40)]
    whole = concat(parts)
    assert torch.equal(unpack_linear(whole), torch.cat([unpack_linear(part) for part in parts]))
    assert torch.equal(unpack_linear(whole.narrow(64, 32)), unpack_linear(parts[1]))


def test_groups_and_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="group=48: expected 16, 32 or a multiple of 64"):
        pack_linear(torch.randn(32, 96), "affine4", int4_group=48)
    with pytest.raises(ValueError, match=r"offset of shape \(32, 2\)"):
        AffineGroups(torch.zeros(32, 96, dtype=torch.uint8), torch.ones(32, 3), torch.ones(32, 2), 4, 32)
    with pytest.raises(affine.NotHalfError, match="not representable in float16"):
        affine.pack(random_groups(32, 64, 4, 32, half=False), half=True)
