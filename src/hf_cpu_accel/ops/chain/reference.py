"""The reference of a chain of convolutions in PyTorch, and the shape of its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.abi import POINTWISE_ACTIVATIONS, STEP_KINDS, StepLayout, columns, read
from hf_cpu_accel.ops.chain.steps import POINTWISE, SAME
from hf_cpu_accel.ops.convolution import conv2d_reference, out_size
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.convolution import is_of_windows, unpack_conv2d
from hf_cpu_accel.packing.linear import PackedWeight


def steps_in(layout: list[int]) -> list[StepLayout]:
    width = len(columns(StepLayout))
    return [read(StepLayout, layout[start : start + width]) for start in range(0, len(layout), width)]


def _windows(step: StepLayout, shape: Sequence[int]) -> list[list[int]]:
    """[size, stride, padding, dilation, more zeros behind the image], each of both sides, on an image of that
    shape, [B, H, W, C]."""
    size, stride, padding, dilation, more = (
        [sides.rows, sides.columns]
        for sides in (step.size, step.stride, step.padding, step.dilation, step.more)
    )
    for side in (0, 1):
        if more[side] == SAME:
            before, after = same_padding(shape[1 + side], size[side], stride[side], dilation[side])
            padding[side], more[side] = before, after - before
    return [size, stride, padding, dilation, more]


def same_padding(pixels: int, size: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return the zeros before and after the pixels for TensorFlow's padding "same".

    There are as many outputs as strides. If the number of zeros is odd, one more is after than before.
    """
    zeros = max((-(-pixels // stride) - 1) * stride + dilation * (size - 1) + 1 - pixels, 0)
    return zeros // 2, zeros - zeros // 2


def chain_reference(input: Tensor, parts: list[Tensor], layout: list[int], narrow: bool) -> Tensor:
    """Compute the steps one after another in PyTorch."""
    images, in_bytes = [input.float()], {0: False}
    between = torch.bfloat16 if narrow else input.dtype
    for step in steps_in(layout):
        kind, range = STEP_KINDS[step.kind], None if step.range < 0 else parts[step.range]
        in_bytes[len(images)] = range is not None or (kind == "max pooling" and in_bytes[step.source])
        output = _computed(kind, step, images, parts, in_bytes[step.source])
        if range is not None:
            output = _rounded(output, *range.tolist())
        images.append(output if in_bytes[len(images)] else output.to(between).float())
    return output.to(input.dtype)


def _computed(
    kind: str, step: StepLayout, images: list[Tensor], parts: list[Tensor], in_bytes: bool
) -> Tensor:
    """Compute the output of a step from the images before it; `in_bytes`: whether its input is in bytes."""
    source, activation = images[step.source], POINTWISE_ACTIVATIONS[step.activation]
    residual = None if step.residual < 0 else images[step.residual]
    size, stride, padding, dilation, more = _windows(step, source.shape)
    if kind == "mean":
        return source.mean((1, 2), keepdim=True)
    if kind == "channels":
        both = source if residual is None else torch.cat((source, residual), -1)
        return both[..., parts[step.weight].long()]
    if kind == "affine":
        return POINTWISE[activation](torch.addcmul(parts[step.bias], source, parts[step.weight]))
    if kind in ("sum", "product"):
        combined = (
            source if residual is None else source * residual if kind == "product" else source + residual
        )
        return POINTWISE[activation](combined)
    if kind == "max pooling":
        return functional.max_pool2d(source.movedim(-1, 1), size, stride, padding).movedim(1, -1)
    if kind.startswith("average pooling"):
        zeros = kind == "average pooling"
        image = source.movedim(-1, 1)
        return functional.avg_pool2d(image, size, stride, padding, count_include_pad=zeros).movedim(1, -1)
    weight, scale, bias = (
        None if index < 0 else parts[index] for index in (step.weight, step.scale, step.bias)
    )
    assert weight is not None
    if any(more):
        (top, left), (rows, columns) = padding, more
        source = functional.pad(source, (0, 0, left, left + columns, top, top + rows))
        padding = [0, 0]
    if kind == "grouped":
        values = weight.permute(2, 1, 0).unflatten(2, size)
        image, groups = source.movedim(-1, 1), len(values) // values.shape[1]
        outputs = functional.conv2d(
            image, values, bias, tuple(stride), tuple(padding), tuple(dilation), groups
        )
        return ACTIVATIONS[activation](outputs.movedim(1, -1))
    window = (step.out_channels, size, stride, padding, dilation)
    reference = _of_bytes if in_bytes and is_of_windows(weight) else conv2d_reference
    return reference(source, weight, scale, bias, residual, *window, activation)


def _rounded(image: Tensor, low: float, high: float) -> Tensor:
    """Return the values of an image in bytes: clamped to a range and rounded to 255 steps of it."""
    step = (high - low) / 255
    if step == 0:
        return torch.zeros_like(image)
    zero = round(-low / step)
    return ((torch.round(image / step) + zero).clamp(0, 255) - zero) * step


def _of_bytes(
    image: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_channels: int,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
) -> Tensor:
    """Compute a convolution of an image that is already rounded."""
    packed = PackedWeight(weight, scale, size[0] * size[1] * image.shape[-1], out_channels, "int8")
    values, offset = unpack_conv2d(packed, size), None if bias is None else bias.float()
    output = functional.conv2d(
        image.movedim(-1, 1), values, offset, tuple(stride), tuple(padding), tuple(dilation)
    )
    output = output.movedim(1, -1) if residual is None else output.movedim(1, -1) + residual
    return ACTIVATIONS[activation](output)


def output_shape(shape: Sequence[int], layout: list[int]) -> tuple[int, ...]:
    """Return the shape [B, H', W', N] of the last step for an input of shape [B, H, W, C]."""
    shapes = [tuple(shape)]
    for step in steps_in(layout):
        batch, *sides, _ = shapes[step.source]
        if STEP_KINDS[step.kind] == "mean":
            sides = [1, 1]
        else:
            *windows, more = _windows(step, shapes[step.source])
            padded = [side + zeros for side, zeros in zip(sides, more, strict=True)]
            sides = [out_size(*side) for side in zip(padded, *windows, strict=True)]
        shapes.append((batch, *sides, step.out_channels))
    return shapes[-1]
