"""convolutions, kept_convolutions: several convolutions, each with its norm, residual and activation, and poolings, in one call.

A residual block (He et al. 2015, arXiv:1512.03385) is three or four of them on images that are small where they have many
channels: calling each from Python takes as long as half of the arithmetic, and what passes between them need not be wider than what
they read. Images whose range is known beforehand pass in 8 bits, which int8 weights multiply as they are. To look up the arguments
of fifty steps takes a tenth of the time of their arithmetic for one small image: the library keeps what it has found.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.convolution import conv2d_reference, out_size
from hf_cpu_accel.ops.kept import Kept, can_keep
from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing.convolution import is_of_windows, unpack_conv2d
from hf_cpu_accel.packing.linear import PackedWeight

# The numbers of one step in `layout`, in this order (csrc/ops/convolution.cpp reads it): places in `parts`, -1 for none; which
# image it reads and which is added, -1 for none; and for each side of the window, [height, width], what `conv2d` calls by these
# names. A step without a weight is a max pooling.
LAYOUT = (
    *("weight", "scale", "bias", "range", "source", "residual", "out_channels", "activation"),
    *(f"{name}_{side}" for name in ("size", "stride", "padding", "dilation") for side in ("rows", "columns")),
)


@dataclass(frozen=True)
class ConvolutionStep:
    """activation(conv2d(image[source], weight) + bias + image[residual]); arguments as those of `ops.convolution.conv2d`.

    Attributes:
        source, residual: numbers of images: 0 is the input of the op, i + 1 the output of step i. residual may be None.
        range: (low, high) that the output is clamped to, with 0 between them: it is an image in bytes then, which
            may be pooled, added to others, and read by int8 weights of windows and tiles. None: a floating point image.
    """

    weight: PackedWeight
    bias: Tensor | None
    source: int
    residual: int | None
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    activation: str
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class PoolingStep:
    """The largest pixel of each window of image[source], by channel; arguments as those of `torch.nn.functional.max_pool2d`.

    Of an image in bytes it makes one of the same range.

    Attributes:
        source: see `ConvolutionStep`.
        channels: of that image.
    """

    source: int
    channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


@dataclass(frozen=True, eq=False)
class BoundConvolutions:
    """Steps as the op takes them: made by `bind`. Copies and pickles are bound anew.

    Attributes:
        kept: the same in the library, with what it has looked up for the latest inputs; None without a library.
    """

    parts: list[Tensor]
    layout: list[int]
    narrow: bool
    kept: Kept | None = field(init=False)

    def __post_init__(self) -> None:
        kept = (
            Kept("convolutions", self.parts, self.layout, self.narrow) if can_keep("convolutions") else None
        )
        object.__setattr__(self, "kept", kept)
        if kept is not None:
            _KEPT[kept.number] = self

    def __reduce__(self) -> Any:
        return BoundConvolutions, (self.parts, self.layout, self.narrow)


_KEPT: WeakValueDictionary[int, BoundConvolutions] = WeakValueDictionary()


def bind(steps: Sequence[ConvolutionStep | PoolingStep], *, narrow: bool) -> BoundConvolutions:
    """Look everything up once: a call then passes only lists.

    Args:
        narrow: hand images on from step to step in bfloat16, which is how coarsely bfloat16 and integer weights have them rounded
            in any case; otherwise in the dtype of the input.

    Raises:
        ValueError: no steps, an unknown activation, or a step that reads what only a later one makes.
    """
    if not steps:
        raise ValueError("steps=(): at least one convolution is needed")
    parts: list[Tensor] = []

    def place(tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        parts.append(tensor.detach())
        return len(parts) - 1

    layout: list[int] = []
    for number, step in enumerate(steps):
        for name in ("source", "residual"):
            image = getattr(step, name, None)
            if image is not None and not 0 <= image <= number:
                raise ValueError(
                    f"steps[{number}]: {name}={image}: must be one of the images 0 to {number}, made before it"
                )
        if isinstance(step, PoolingStep):
            layout += [-1, -1, -1, -1, step.source, -1, step.channels, list(ACTIVATIONS).index("none")]
            windows = (step.kernel_size, step.stride, step.padding, (1, 1))
        else:
            check_activation(step.activation)
            layout += [place(step.weight.data), place(step.weight.scale), place(step.bias)]
            layout += [place(None if step.range is None else torch.tensor(step.range, dtype=torch.float32))]
            layout += [step.source, -1 if step.residual is None else step.residual, step.weight.out_features]
            layout += [list(ACTIVATIONS).index(step.activation)]
            windows = (step.kernel_size, step.stride, step.padding, step.dilation)
        layout += itertools.chain.from_iterable(windows)
    return BoundConvolutions(parts, layout, narrow)


def convolutions(input: Tensor, bound: BoundConvolutions) -> Tensor:
    """[B, C, H, W] float32 or bfloat16 -> [B, N, H', W'], the output of the last step, in channels_last and the dtype of the input.

    The input is read as it is in channels_last; anything else is brought into that order, unless it has so few channels that its
    pixels are copied in any case.

    Raises:
        RuntimeError: if the shapes do not fit.
    """
    rows, ops = input.permute(0, 2, 3, 1), torch.ops.hf_cpu_accel
    if (
        bound.kept is None or torch.compiler.is_compiling() or torch.jit.is_tracing()
    ):  # graphs hold the arguments
        output = ops.convolutions(rows, bound.parts, bound.layout, bound.narrow)
    else:
        output = ops.kept_convolutions(rows, bound.kept.number)
    return output.permute(0, 3, 1, 2)


def _steps(layout: list[int]) -> list[dict[str, Any]]:
    width = len(LAYOUT)
    rows = (layout[start : start + width] for start in range(0, len(layout), width))
    return [dict(zip(LAYOUT, row, strict=True)) for row in rows]


def _windows(step: dict[str, Any]) -> list[list[int]]:
    names = ("size", "stride", "padding", "dilation")
    return [[step[f"{name}_rows"], step[f"{name}_columns"]] for name in names]


def _reference(input: Tensor, parts: list[Tensor], layout: list[int], narrow: bool) -> Tensor:
    """One `conv2d` or pooling after another."""
    images, in_bytes = [input.float()], {0: False}
    between = torch.bfloat16 if narrow else input.dtype
    for step in _steps(layout):
        weight, scale, bias, range = (
            None if step[name] < 0 else parts[step[name]] for name in ("weight", "scale", "bias", "range")
        )
        in_bytes[len(images)] = range is not None or (weight is None and in_bytes[step["source"]])
        source, windows = images[step["source"]], _windows(step)
        if weight is None:
            size, stride, padding, _ = windows
            output = functional.max_pool2d(source.movedim(-1, 1), size, stride, padding).movedim(1, -1)
        else:
            residual = None if step["residual"] < 0 else images[step["residual"]]
            activation = list(ACTIVATIONS)[step["activation"]]
            size, stride, padding, dilation = windows
            convolution = (
                weight,
                scale,
                bias,
                residual,
                step["out_channels"],
                size,
                stride,
                padding,
                dilation,
            )
            reads_bytes = in_bytes[step["source"]] and is_of_windows(weight)
            reference = _of_bytes if reads_bytes else conv2d_reference
            output = reference(source, *convolution, activation)
        if range is not None:
            output = _rounded(output, *range.tolist())
        images.append(output if in_bytes[len(images)] else output.to(between).float())
    return output.to(input.dtype)


def _rounded(image: Tensor, low: float, high: float) -> Tensor:
    """The values of an image in bytes: what is clamped to a range and rounded to 255 steps of it."""
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
    """A convolution of an image that needs no more rounding."""
    packed = PackedWeight(weight, scale, size[0] * size[1] * image.shape[-1], out_channels, "int8")
    values, offset = unpack_conv2d(packed, size), None if bias is None else bias.float()
    output = functional.conv2d(
        image.movedim(-1, 1), values, offset, tuple(stride), tuple(padding), tuple(dilation)
    )
    output = output.movedim(1, -1) if residual is None else output.movedim(1, -1) + residual
    return ACTIVATIONS[activation](output)


def output_shape(shape: Sequence[int], layout: list[int]) -> tuple[int, ...]:
    """[B, H', W', N] of the last step for an input [B, H, W, C] of that shape."""
    shapes = [tuple(shape)]
    for step in _steps(layout):
        batch, height, width, _ = shapes[step["source"]]
        sides = zip((height, width), *_windows(step), strict=True)
        shapes.append((batch, *(out_size(*side) for side in sides), step["out_channels"]))
    return shapes[-1]


def _kept_reference(input: Tensor, number: int) -> Tensor:
    return _reference(input, _KEPT[number].parts, _KEPT[number].layout, _KEPT[number].narrow)


def _kept_fake(input: Tensor, number: int) -> Tensor:
    return input.new_empty(output_shape(input.shape, _KEPT[number].layout))


def _fake(input: Tensor, parts: list[Tensor], layout: list[int], narrow: bool) -> Tensor:
    return input.new_empty(output_shape(input.shape, layout))


declare(
    "convolutions(Tensor input, Tensor[] parts, int[] layout, bool narrow) -> Tensor",
    fake=_fake,
    reference=_reference,
)
declare("kept_convolutions(Tensor input, int number) -> Tensor", fake=_kept_fake, reference=_kept_reference)
