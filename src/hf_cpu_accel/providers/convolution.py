"""Convolutions by oneDNN on weights that lie in its own blocked layout, which torch otherwise makes of them in every call; and
whether ours are faster.

All unstable op names of torch for convolutions are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel import extension
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
# As in providers/layer.py: what a fused chain gains besides.
_JOINED_GAIN = 0.15
_LIBRARY = "oneDNN"
# Which layout is best hardly depends on the size of the image, but oneDNN wants to know one.
_IMAGE_SIZE = 32


@dataclass(frozen=True)
class Geometry:
    """How the kernel of a 2-d convolution moves: all as in `torch.nn.Conv2d`, as pairs."""

    padding: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass(frozen=True)
class Sample:
    """A convolution that stands for others when it is measured; all of its sides are alike."""

    channels: int
    out_channels: int
    side: int
    kernel_size: int
    stride: int = 1


# Those of many pixels; those of very many weights; and those that read the colors of a photo.
_USUAL, _MANY, _COLORS = Sample(128, 128, 28, 3), Sample(1280, 1280, 16, 3), Sample(3, 64, 224, 7, 2)
# With fewer, most of a panel or of a run of memory is padding, and it is there that images come in and go out.
MIN_CHANNELS = 16


def prepack(weight: Tensor, geometry: Geometry) -> Tensor:
    """A copy of `weight` [out_channels, in_channels / groups, height, width], float32 or bfloat16, in oneDNN's layout."""
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
    """activation(convolution + bias + residual): [N, C, H, W] -> [N, out_channels, H', W'].

    All are `torch.channels_last` and in the dtype of `weight`. `activation` is one of ACTIVATIONS, with a residual
    one of ACTIVATIONS_OF_SUMS. A trace of `torch.jit.trace` gets torch's own convolution, since oneDNN's layout cannot be saved.
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
    """Whether this torch has the ops for weights of `dtype`, and they compute what they should."""
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
    return all(PROVIDER_CONVOLUTION.holds(*pair) for pair in pairs) and torch.equal(unpacked, weight)


def compute_dtype(dtype: str) -> torch.dtype:
    """What oneDNN computes in where linears are packed as `dtype`: bfloat16 only where the CPU is faster with it.

    It takes bfloat16 to the CPU's own dot products, which some CPUs run at half the rate of float32.
    """
    narrow = dtype != "float32" and hardware.native_bf16_is_fast()
    return torch.bfloat16 if narrow else torch.float32


def sample_of(in_channels: int, *, many: bool) -> Sample:
    """What stands for a convolution of so many channels; many: weights."""
    return _COLORS if in_channels < MIN_CHANNELS else _MANY if many else _USUAL


def by_tiles(shape: Sequence[int], dtype: str, stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether our convolution with a weight of that shape is to be computed by tiles of the image (packing/winograd.py).

    AMX has the products of 8 bits done before the sums around those by tiles are.
    """
    amx = extension.status().tier in ("amx", hardware.EMULATED_AMX)
    return takes_tiles(shape, dtype, stride, dilation) and not (amx and dtype == "int8")


def native_is_faster(dtype: str, library: torch.dtype, sample: Sample, *, tiled: bool, joined: bool) -> bool:
    """Whether our convolution on weights packed as `dtype` should serve instead of oneDNN's in `library`, on the threads in use.

    Measured once in a process, in about 50 ms, or, for convolutions of many weights, half a second.

    Args:
        tiled: ours is computed by tiles of the image.
        joined: it is one of several between which nothing else happens. One call for all of them gains what oneDNN may be ahead.
    """
    seconds = _measured(dtype, library, sample, tiled, torch.get_num_threads())
    ahead = _JOINED_GAIN if joined else MARGIN
    return seconds is None or (1 - ahead) * seconds[NATIVE] <= seconds[_LIBRARY]


@cache
def _measured(
    dtype: str, library: torch.dtype, sample: Sample, tiled: bool, threads: int
) -> dict[str, float] | None:
    """Seconds of one convolution by both, or None where there is only ours."""
    if not works(library):
        return None
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, sample.channels, sample.side, sample.side, generator=generator)
    kernel, stride = (sample.kernel_size,) * 2, (sample.stride,) * 2
    padding = (sample.kernel_size // 2,) * 2
    weight = torch.randn(sample.out_channels, sample.channels, *kernel, generator=generator)
    geometry = Geometry(padding, stride, (1, 1), 1)
    if sample is not _COLORS:  # photos come as they are
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
