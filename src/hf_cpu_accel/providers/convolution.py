"""Convolutions by oneDNN on weights that lie in its own blocked layout, which torch otherwise makes of them in every call.

All unstable op names of torch for convolutions are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# {name in `ops.linear.ACTIVATIONS`: (oneDNN's name, algorithm)}
ACTIVATIONS = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "tanh": ("tanh", ""),
}
ACTIVATIONS_OF_SUMS = ("none", "relu")
# Which layout is best hardly depends on the size of the image, but oneDNN wants to know one.
_IMAGE_SIZE = 32


@dataclass(frozen=True)
class Geometry:
    """How the kernel of a 2-d convolution moves: all as in `torch.nn.Conv2d`, as pairs."""

    padding: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


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
    one of ACTIVATIONS_OF_SUMS.
    """
    window = (geometry.padding, geometry.stride, geometry.dilation, geometry.groups)
    name, algorithm = ACTIVATIONS[activation]
    if residual is None:
        return torch.ops.mkldnn._convolution_pointwise(input, weight, bias, *window, name, [], algorithm)
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
    alike = torch.allclose(output.float(), expected, atol=0.1, rtol=0.02)
    alike = alike and torch.allclose(sums.float(), (2 * expected).relu(), atol=0.2, rtol=0.02)
    return alike and torch.equal(unpacked, weight)
