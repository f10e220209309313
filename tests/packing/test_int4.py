"""Four-bit weights: levels and the order of bytes."""

from __future__ import annotations

import torch

from hf_cpu_accel.packing.linear import int4, pack_linear, unpack_linear, unpack_values

LEVELS = torch.tensor(int4.LEVELS, dtype=torch.float32)


def test_levels_follow_their_index() -> None:
    index = torch.arange(16.0) - int4.ZERO
    assert torch.equal(int4.levels_of(index), LEVELS)
    assert max(map(abs, int4.LEVELS)) * int4.LARGEST_MULTIPLIER <= 127


def test_bytes_are_where_the_kernels_look_for_them() -> None:
    index = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    multiplier = torch.randint(-12, 13, (64, 2), dtype=torch.int8)
    data = int4.pack(index, multiplier, 64)
    assert data.shape == (2, 2, 32 + 16 * 64)
    for feature, k in ((0, 0), (40, 77), (63, 127), (5, 68)):
        panel, column, group, rest = feature // 32, feature % 32, k // 64, k % 64
        byte = int(data[panel, group, 32 + rest // 8 * 128 + column * 4 + rest % 4])
        assert (byte >> 4 if rest % 8 >= 4 else byte & 15) == index[feature, k]
        assert data[panel, group, column].view(torch.int8) == multiplier[feature, group]
    levels = LEVELS[index.int()].unflatten(1, (2, 64)) * multiplier[..., None]
    assert torch.equal(int4.unpack(data).float(), levels.flatten(1))


def test_a_quiet_group_keeps_its_bits() -> None:
    """A group of values far below the row's largest gets a multiplier of its own."""
    weight = torch.randn(32, 256)
    weight[:, 128:] /= 8
    error = unpack_linear(pack_linear(weight, "int4")) - weight
    assert error[:, 128:].norm() / weight[:, 128:].norm() < 0.15


def test_sums_are_those_of_the_integers() -> None:
    packed = pack_linear(torch.randn(70, 100), "int4")
    assert packed.scale is not None
    assert torch.equal(unpack_values(packed).sum(1, dtype=torch.float32), packed.scale[1])
