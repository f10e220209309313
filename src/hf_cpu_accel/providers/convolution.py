"""Convolutions by oneDNN on weights in its blocked layout, which torch otherwise converts in every call, and the choice between
oneDNN and `conv2d`.

All unstable op names of torch for convolutions are in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel import extension
from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.convolution import conv2d
from hf_cpu_accel.ops.linear import ACTIVATIONS as REFERENCES
from hf_cpu_accel.packing.convolution import pack_conv2d, takes_tiles
from hf_cpu_accel.providers.autotune import MARGIN, NATIVE, autotune
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.tracing import untraced
from hf_cpu_accel.tolerance import PROVIDER_CONVOLUTION

# {name in `ops.linear.ACTIVATIONS`: (oneDNN's name, its numbers, algorithm)}
ACTIVATIONS: dict[str, tuple[str, list[float], str]] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "tanh": ("tanh", [], ""),
    "relu6": ("hardtanh", [0.0, 6.0], ""),
    "hardswish": ("hardswish", [], ""),
    "leaky_relu": ("leaky_relu", [0.01], ""),
    "leaky_relu_tenth": ("leaky_relu", [0.1], ""),
}
ACTIVATIONS_OF_SUMS = ("none", "relu")
# The additional gain of a fused chain, as in providers/layer.py.
_JOINED_GAIN = 0.15
_LIBRARY = "oneDNN"
# oneDNN needs an image size to choose the layout, which hardly depends on it.
_IMAGE_SIZE = 32


@dataclass(frozen=True)
class Geometry:
    """The geometry of a 2-d convolution, as pairs, see `torch.nn.Conv2d`."""

    padding: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass(frozen=True)
class Sample:
    """A square convolution that is measured as a sample of others."""

    channels: int
    out_channels: int
    side: int
    kernel_size: int
    stride: int = 1


# Samples of convolutions with many pixels, with large weights, and on RGB images.
_USUAL, _MANY, _COLORS = Sample(128, 128, 28, 3), Sample(1280, 1280, 16, 3), Sample(3, 64, 224, 7, 2)
# With fewer channels, most of a panel is padding; these are the first and last convolutions of a model.
MIN_CHANNELS = 16


def prepack(weight: Tensor, geometry: Geometry) -> Tensor:
    """Return a copy of `weight` [out_channels, in_channels / groups, height, width], float32 or bfloat16, in oneDNN's layout."""
    channels = weight.shape[1] * geometry.groups
    return torch.ops.mkldnn._reorder_convolution_weight(
        weight.detach().contiguous(),
        geometry.padding,
        geometry.stride,
        geometry.dilation,
        geometry.groups,
        [1, channels, _IMAGE_SIZE, _IMAGE_SIZE],
    )


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute activation(convolution + bias + residual).

    A trace of `torch.jit.trace` records torch's own convolution, since oneDNN's layout cannot be saved.

    Args:
        input: [N, C, H, W], channels_last, in the dtype of `weight`.
        weight: from `prepack`.
        bias: [out_channels] in the dtype of `weight`, or None.
        geometry: of the convolution.
        activation: one of ACTIVATIONS, with a residual one of ACTIVATIONS_OF_SUMS.
        residual: [N, out_channels, H', W'], channels_last, in the dtype of `weight`, or None.

    Returns:
        [N, out_channels, H', W'], channels_last, in the dtype of `weight`.
    """
    if torch.jit.is_tracing():
        with untraced():
            weight = weight.to_dense()
        moves = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        output = functional.conv2d(input, weight, bias, *moves)
        return REFERENCES[activation](output if residual is None else output + residual)
    window = (geometry.padding, geometry.stride, geometry.dilation, geometry.groups)
    name, numbers, algorithm = ACTIVATIONS[activation]
    if residual is None:
        return torch.ops.mkldnn._convolution_pointwise(input, weight, bias, *window, name, numbers, algorithm)
    after = None if activation == "none" else name
    return torch.ops.mkldnn._convolution_pointwise.binary(
        input, residual, weight, bias, *window, "add", 1.0, after, [], None
    )


@cache
def works(dtype: torch.dtype) -> bool:
    """Return whether this torch has the ops for weights of `dtype`, and they compute the right results."""
    generator = torch.Generator().manual_seed(0)
    input, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((1, 16, 5, 6), (24, 16, 3, 3))
    )
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    try:
        with torch.no_grad():
            packed = prepack(weight, geometry)
            image = input.to(memory_format=torch.channels_last)
            output = convolve(image, packed, None, geometry)
            sums = convolve(image, packed, None, geometry, "relu", output)
            unpacked = packed.to_dense()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the op is not in this torch, has another signature, or is not built for this CPU
    expected = functional.conv2d(input.float(), weight.float(), padding=1)
    pairs = ((output.float(), expected), (sums.float() / 2, expected.relu()))
    return all(compare(*pair).within(PROVIDER_CONVOLUTION) for pair in pairs) and torch.equal(
        unpacked, weight
    )


def compute_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of oneDNN's convolutions in a model packed as `dtype`: bfloat16 only if it is faster than float32.

    oneDNN uses the CPU's bfloat16 dot products, which some CPUs run at half the rate of float32.
    """
    narrow = dtype != "float32" and hardware.native_bf16_is_fast()
    return torch.bfloat16 if narrow else torch.float32


def sample_of(in_channels: int, *, many: bool) -> Sample:
    """Return the sample for a convolution with `in_channels`; `many` means a large weight."""
    return _COLORS if in_channels < MIN_CHANNELS else _MANY if many else _USUAL


def by_tiles(shape: Sequence[int], dtype: str, stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Return whether `conv2d` should compute a weight of that shape by tiles of the image (packing/winograd.py).

    Not in int8 with AMX, where the products take less time than the transforms of tiles.
    """
    amx = extension.status().tier in ("amx", hardware.EMULATED_AMX)
    return takes_tiles(shape, dtype, stride, dilation) and not (amx and dtype == "int8")


def native_is_faster(dtype: str, library: torch.dtype, sample: Sample, *, tiled: bool, joined: bool) -> bool:
    """Return whether `conv2d` on weights packed as `dtype` is faster than oneDNN in `library`, on the present threads.

    Measured once in a process, in about 50 ms, or half a second for convolutions with many weights.

    Args:
        dtype: of the packed weight.
        library: the dtype of oneDNN's convolution.
        sample: the convolution to measure.
        tiled: `conv2d` computes tiles of the image.
        joined: the convolution is part of a chain that runs as one call, which makes up for a small lead of oneDNN.
    """
    seconds = _measured(dtype, library, sample, tiled, torch.get_num_threads())
    ahead = _JOINED_GAIN if joined else MARGIN
    return seconds is None or (1 - ahead) * seconds[NATIVE] <= seconds[_LIBRARY]


@cache
def _measured(
    dtype: str, library: torch.dtype, sample: Sample, tiled: bool, threads: int
) -> dict[str, float] | None:
    """Return the seconds of one convolution by both, or None if oneDNN's does not work."""
    if not works(library):
        return None
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, sample.channels, sample.side, sample.side, generator=generator)
    kernel, stride = (sample.kernel_size,) * 2, (sample.stride,) * 2
    padding = (sample.kernel_size // 2,) * 2
    weight = torch.randn(sample.out_channels, sample.channels, *kernel, generator=generator)
    geometry = Geometry(padding, stride, (1, 1), 1)
    if sample is not _COLORS:  # input images are usually not channels_last
        image = image.to(memory_format=torch.channels_last)
    with torch.no_grad():
        ours, theirs = pack_conv2d(weight, dtype, tiled=tiled), prepack(weight.to(library), geometry)
        candidates = {
            NATIVE: lambda: conv2d(image, ours, kernel_size=kernel, stride=stride, padding=padding),
            _LIBRARY: lambda: convolve(
                image.to(library, memory_format=torch.channels_last), theirs, None, geometry
            ).to(image.dtype),
        }
        return autotune(candidates).seconds
