"""Packed weights of convolutions: round trips, error bounds, shapes."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel.ops.convolution import conv2d
from hf_cpu_accel.packing.convolution import (
    pack_conv2d,
    packed_shapes,
    takes_tiles,
    transformed_weight,
    unpack_conv2d,
)
from hf_cpu_accel.packing.linear import concat, dtype_of
from hf_cpu_accel.packing.winograd import recover_weight, transform_weight


@pytest.mark.parametrize("shape", [(40, 16, 3, 3), (3, 5, 2, 4), (64, 64, 1, 1)], ids=str)
def test_windows_come_back(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    assert torch.equal(unpack_conv2d(pack_conv2d(weight, "float32"), shape[2:]), weight)
    assert torch.equal(unpack_conv2d(pack_conv2d(weight, "bfloat16"), shape[2:]), weight.bfloat16().float())


def test_integers_for_whole_images() -> None:
    weight = torch.randn(40, 64, 3, 3)
    packed = pack_conv2d(weight, "int8")
    assert (packed.data.shape, packed.dtype, dtype_of(packed.data)) == ((2, 9, 16, 32, 4), "int8", "int8")
    assert packed.scale is not None
    scale, sums = packed.scale[:, :, None, None, None]
    unpacked = unpack_conv2d(packed, (3, 3))
    assert ((unpacked - weight).abs() <= 0.5001 * scale).all()
    assert torch.equal((unpacked / scale).round().sum((1, 2, 3)), sums[:, 0, 0, 0])
    assert pack_conv2d(torch.randn(32, 48, 3, 3), "int8").data.dim() == 4  # does not fill lines: by patch


@pytest.mark.parametrize(
    ("dtype", "word", "error"), [("float32", 1, 1e-6), ("bfloat16", 2, 4e-3), ("int8", 4, 2e-2)]
)
def test_tiles(dtype: str, word: int, error: float) -> None:
    weight = torch.randn(200, 224, 3, 3)
    packed = pack_conv2d(weight, dtype, tiled=True)
    assert packed.data.shape == (7, 4, 4, 224 // word, 32, word)
    assert (packed.in_features, packed.out_features, dtype_of(packed.data)) == (2016, 200, dtype)
    transformed, expected = transformed_weight(packed), transform_weight(weight)
    assert (transformed - expected).norm() <= error * expected.norm()
    assert (unpack_conv2d(packed, (3, 3)) - weight).norm() <= 2 * error * weight.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_ranges_of_features_are_views_and_can_be_joined(dtype: str) -> None:
    weight = torch.randn(200, 192, 3, 3)
    packed = pack_conv2d(weight, dtype, tiled=True)
    parts = [packed.narrow(0, 64), packed.narrow(64, 136)]
    assert parts[1].data.data_ptr() == packed.data[2:].data_ptr()
    assert torch.equal(transformed_weight(parts[1]), transformed_weight(packed)[:, 64:])
    assert torch.equal(unpack_conv2d(concat(parts), (3, 3)), unpack_conv2d(packed, (3, 3)))
    image, window = torch.randn(1, 192, 6, 5), {"kernel_size": (3, 3), "padding": (1, 1)}
    whole = conv2d(image, packed, **window)
    assert torch.equal(torch.cat([conv2d(image, part, **window) for part in parts], dim=1), whole)


def test_a_weight_comes_back_from_its_transform() -> None:
    weight = torch.randn(6, 5, 3, 3)
    assert torch.allclose(recover_weight(transform_weight(weight)), weight, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("channels", [192, 224])
def test_shapes_are_known_ahead(dtype: str, tiled: bool, channels: int) -> None:
    shape = (200, channels, 3, 3)
    packed = pack_conv2d(torch.randn(shape), dtype, tiled=tiled)
    tensors = [packed.data] if packed.scale is None else [packed.data, packed.scale]
    assert packed_shapes(shape, dtype, tiled=tiled) == [(tuple(t.shape), t.dtype) for t in tensors]


def test_which_are_for_tiles() -> None:
    assert takes_tiles((8, 32, 3, 3), "float32")
    assert not takes_tiles((8, 32, 3, 3), "int8")
    assert takes_tiles((192, 192, 3, 3), "int8")
    assert not takes_tiles((192, 192, 3, 3), "int4")
    assert not takes_tiles((8, 40, 3, 3), "float32")
    assert not takes_tiles((8, 32, 1, 3), "float32")
    assert not takes_tiles((8, 32, 3, 3), "float32", stride=(2, 1))
    assert not takes_tiles((8, 32, 3, 3), "float32", dilation=(1, 2))
    assert not takes_tiles((8, 0, 3, 3), "float32")
    assert not takes_tiles((0, 32, 3, 3), "float32")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(3, 4, 5\)"):
        pack_conv2d(torch.randn(3, 4, 5), "float32")
    with pytest.raises(
        ValueError, match=r"tiled=True: a weight of shape \(8, 40, 3, 3\) in float32 is not for tiles"
    ):
        pack_conv2d(torch.randn(8, 40, 3, 3), "float32", tiled=True)
