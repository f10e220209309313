"""conv2d: activation(convolution(input, weight) + bias + residual), as a GEMM on patches that are gathered while they are packed.

The op reads and returns images [batch, height, width, channels], the memory order of torch's channels_last. A patch is a row of
kernel height x kernel width x channels, so the weight is packed as that of a linear layer, in each of its dtypes. With integer
weights the input is quantized per patch. In int8, images of 64, 128, ... channels are quantized as a whole instead: each pixel
once. A weight for tiles computes 3 x 3 windows by tiles of the image, with less than half of the multiplications (winograd.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation, linear_reference, quantize_rows
from hf_cpu_accel.ops.registry import by_name, declare
from hf_cpu_accel.packing import winograd
from hf_cpu_accel.packing.convolution import is_of_tiles, is_of_windows, transformed_weight, unpack_conv2d
from hf_cpu_accel.packing.linear import PackedWeight, dtype_of, pack_linear


def conv2d(
    input: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute activation(conv2d(input, weight) + bias + residual), without groups.

    Args:
        input: [B, C, H, W] float32 or bfloat16. channels_last is read without a copy, other orders are converted to it, except
            images with few channels, whose pixels are copied anyway.
        weight: from `pack_conv2d`, C input channels and N output channels.
        bias: [N] float32 or bfloat16, or None.
        kernel_size, stride, padding, dilation: (height, width) in pixels; padding is zeros.
        activation: one of `ops.linear.ACTIVATIONS`.
        residual: [B, N, H', W'], added before the activation as in residual networks (He et al. 2015, arXiv:1512.03385), or None.

    Returns:
        [B, N, H', W'] in channels_last, dtype of the input; sums are float32 (int32 for integer weights).

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
        RuntimeError: the window is larger than the padded input, or a derivative with respect to an input is computed.
    """
    check_activation(activation)
    height, width = kernel_size
    if input.dim() != 4 or input.shape[1] * height * width != weight.in_features:
        raise ValueError(
            f"input of shape {tuple(input.shape)}: expected [batch, channels, height, width] with "
            f"{weight.in_features / (height * width):g} channels"
        )
    refuse_derivatives("conv2d", input, bias, residual)
    return torch.ops.hf_cpu_accel.conv2d(
        input.permute(0, 2, 3, 1),
        weight.data,
        weight.scale,
        bias,
        None if residual is None else residual.permute(0, 2, 3, 1),
        weight.out_features,
        list(kernel_size),
        list(stride),
        list(padding),
        list(dilation),
        activation,
    ).permute(0, 3, 1, 2)


def out_size(pixels: int, size: int, stride: int, padding: int, dilation: int) -> int:
    """Return the output size of a convolution along one side: how often a window of `size` pixels fits into `pixels`."""
    return (pixels + 2 * padding - dilation * (size - 1) - 1) // stride + 1


_SCHEMA = (
    "conv2d(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_channels, int[] kernel_size, "
    "int[] stride, int[] padding, int[] dilation, str activation) -> Tensor"
)


@by_name(_SCHEMA)
def conv2d_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch: by tiles, or by `linear_reference` on patches."""
    input, weight, scale, bias = given.input, given.weight, given.scale, given.bias
    images = input.permute(0, 3, 1, 2).float()
    if is_of_tiles(weight):
        packed = PackedWeight(weight, scale, 9 * input.shape[-1], given.out_channels, dtype_of(weight))
        rows, columns = given.padding
        rounded = quantize_rows if scale is not None else lambda rows: rows
        output = winograd.convolve(images, transformed_weight(packed), (rows, columns), rounded)
        output = output.permute(0, 2, 3, 1).contiguous()
        output = output if bias is None else output + bias.float()
    else:
        output = _by_patches(images, given)
    output = output if given.residual is None else output + given.residual.float()
    return ACTIVATIONS[given.activation](output).to(input.dtype)


def _by_patches(images: Tensor, given: Any) -> Tensor:
    """[B, C, H, W] float32 -> [B, H', W', out_channels]."""
    batch, channels, height, width = images.shape
    weight, scale, kernel_size, out_channels = (
        given.weight,
        given.scale,
        given.kernel_size,
        given.out_channels,
    )
    # Padded before `unfold`, which rejects images without pixels. And the zeros are rounded with the image: where a pixel is NaN,
    # they become NaN too.
    rows, columns = given.padding
    images = F.pad(images, (columns, columns, rows, rows))
    if is_of_windows(weight):
        images = _quantized(images)
        features = kernel_size[0] * kernel_size[1] * channels
        values = unpack_conv2d(PackedWeight(weight, scale, features, out_channels, "int8"), kernel_size)
        weight, scale = pack_linear(values.permute(0, 2, 3, 1).flatten(1), "float32").data, None
    window = {"dilation": tuple(given.dilation), "stride": tuple(given.stride)}
    patches = F.unfold(images, tuple(kernel_size), **window)
    patches = patches.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1, 2).transpose(1, 2)
    output = linear_reference(patches, weight, scale, given.bias, None, out_channels, "none")
    sides = zip((height, width), kernel_size, given.stride, given.padding, given.dilation, strict=True)
    return output.view(batch, *(out_size(*side) for side in sides), out_channels)


def _quantized(images: Tensor) -> Tensor:
    """Return float32 [B, C, H, W] rounded to 8 bits over the range of each image, and dequantized."""
    if images.numel() == 0:
        return images
    low = images.amin(dim=(1, 2, 3), keepdim=True).clamp(max=0)
    step = (images.amax(dim=(1, 2, 3), keepdim=True).clamp(min=0) - low) / 253
    # NaN anywhere makes all of the image NaN, so that the error stays visible.
    return torch.where(step == 0, images, torch.round(images / torch.where(step == 0, 1.0, step)) * step)


def _fake(input: Tensor, *arguments: Any) -> Tensor:
    out_channels, *window, _ = arguments[4:]
    sides = zip(input.shape[1:3], *window, strict=True)
    return input.new_empty((input.shape[0], *(out_size(*side) for side in sides), out_channels))


declare(_SCHEMA, fake=_fake, reference=conv2d_reference)
