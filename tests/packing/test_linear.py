"""Packed weights: exact round trips, error bounds, views and concatenation."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel.packing.linear import (
    DTYPES,
    FORMS,
    concat,
    dtype_of,
    pack_linear,
    unpack_linear,
)
from hf_cpu_accel.packing.rotation import rotate_back

SHAPES = [(1, 1), (32, 4), (33, 5), (70, 129), (64, 768)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_bit_exact(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack_linear(pack_linear(weight, "float32")), weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_rounded_to_nearest(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack_linear(pack_linear(weight, "bfloat16")), weight.bfloat16().float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["int8", "int8-weight"])
def test_int8_is_at_most_half_a_step_off(shape: tuple[int, int], dtype: str) -> None:
    weight = torch.randn(shape)
    packed = pack_linear(weight, dtype)
    assert packed.scale is not None
    values = rotate_back(unpack_linear(packed))
    error = (values - rotate_back(weight)).abs()
    assert (error <= packed.scale[0, :, None] * 0.5001).all()
    steps = torch.round(values / packed.scale[0, :, None].clamp_min(1e-30))
    assert torch.equal(steps.sum(dim=1), packed.scale[1])


@pytest.mark.parametrize("dtype", FORMS)
def test_a_zero_row_stays_zero(dtype: str) -> None:
    weight = torch.randn(40, 16)
    weight[7] = 0
    packed = pack_linear(weight, dtype)
    assert torch.equal(unpack_linear(packed)[7], torch.zeros(16))


@pytest.mark.parametrize("dtype", FORMS)
def test_concat_then_narrow_gives_the_parts(dtype: str) -> None:
    parts = [pack_linear(torch.randn(n, 48), dtype) for n in (64, 32, 50)]
    whole = concat(parts)
    assert whole.out_features == 146
    start = 0
    for part in parts:
        view = whole.narrow(start, part.out_features)
        assert torch.equal(unpack_linear(view), unpack_linear(part))
        assert view.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
        start += part.out_features


def test_sizes_are_those_of_the_dtype() -> None:
    weight = torch.randn(64, 128)
    assert pack_linear(weight, "float32").nbytes == weight.nbytes
    assert pack_linear(weight, "bfloat16").nbytes == weight.nbytes // 2
    scales = 2 * 64 * 4
    assert pack_linear(weight, "int8").nbytes == weight.nbytes // 4 + scales
    assert pack_linear(weight, "int8-weight").nbytes == weight.nbytes // 4 + scales
    for group in (32, 64, 128):
        packed = pack_linear(weight, "int4", int4_group=group)
        assert packed.nbytes == weight.numel() // 2 + weight.numel() // group + scales


@pytest.mark.parametrize(
    ("dtype", "group", "bound"),
    [
        ("bfloat16", 32, 1.7e-3),
        ("int8", 32, 9e-3),
        ("int8-weight", 32, 9e-3),
        ("int4", 32, 0.081),
        ("int4", 64, 0.087),
        ("int4", 128, 0.092),
    ],
)
def test_relative_error_of_a_normal_matrix(dtype: str, group: int, bound: float) -> None:
    """Published in docs/reference/dtypes.md."""
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
    error = unpack_linear(pack_linear(weight, dtype, int4_group=group)) - weight
    assert 0.9 * bound < error.norm() / weight.norm() < bound


@pytest.mark.parametrize("dtype", FORMS)
def test_the_tensor_tells_its_dtype(dtype: str) -> None:
    assert dtype_of(pack_linear(torch.randn(40, 50), dtype).data) == dtype


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="dtype='int3'"):
        pack_linear(torch.randn(4, 4), "int3")
    with pytest.raises(ValueError, match="group=48: expected one of 32, 64, 128"):
        pack_linear(torch.randn(4, 4), "int4", int4_group=48)
    with pytest.raises(ValueError, match=r"torch.int16 and shape \(4, 4\) is not a packed weight"):
        dtype_of(torch.ones(4, 4, dtype=torch.int16))
    with pytest.raises(ValueError, match="floating point matrix"):
        pack_linear(torch.randn(4), "float32")
    with pytest.raises(ValueError, match="floating point matrix"):
        pack_linear(torch.ones(4, 4, dtype=torch.int32), "float32")
    whole = pack_linear(torch.randn(64, 8), "float32")
    with pytest.raises(ValueError, match="multiple of 32"):
        whole.narrow(16, 32)
    with pytest.raises(ValueError, match="divisible by 32"):
        concat([pack_linear(torch.randn(40, 8), "float32"), whole])
    with pytest.raises(ValueError, match="same dtype"):
        concat([whole, pack_linear(torch.randn(64, 9), "float32")])
    with pytest.raises(ValueError, match="group"):
        concat([pack_linear(torch.randn(32, 128), "int4", int4_group=group) for group in (32, 64)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_dtype_of_the_process_does_not_matter(dtype: str) -> None:
    weight = torch.randn(40, 64)
    expected = pack_linear(weight, dtype)
    torch.set_default_dtype(torch.bfloat16)  # as many scripts have it while they make a model
    try:
        packed = pack_linear(weight, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(packed.data, expected.data)
    assert (packed.scale is None) == (expected.scale is None)
    assert expected.scale is None or torch.equal(packed.scale, expected.scale)
