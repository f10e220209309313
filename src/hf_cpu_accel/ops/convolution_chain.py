"""convolutions, kept_convolutions: several convolutions with their norms, residuals, activations and the ops between, in one call.

A residual block (He et al. 2015, arXiv:1512.03385) is three or four convolutions. On small images with many channels, calling each
from Python takes half as long as the arithmetic. Depthwise convolutions (Howard et al. 2017, arXiv:1704.04861) and channel gates
(Hu et al. 2018, arXiv:1709.01507) have so little arithmetic that calling them takes longer.

- Intermediate images may be bfloat16, or 8 bits where their range is known beforehand, which int8 weights multiply directly.
- Reading the arguments of fifty steps takes a tenth of the arithmetic of one small image, so the library stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hf_cpu_accel.abi import POINTWISE_ACTIVATIONS, STEP_KINDS, SidesLayout, StepLayout, numbers
from hf_cpu_accel.ops.chain.reference import chain_reference, output_shape
from hf_cpu_accel.ops.chain.steps import (
    POINTWISE,
    AffineStep,
    ChannelsStep,
    ConvolutionStep,
    PoolingStep,
    Step,
)
from hf_cpu_accel.ops.kept import Kept, can_keep
from hf_cpu_accel.ops.linear import check_activation
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.runtime.tracing import is_tracing


@dataclass(frozen=True, eq=False)
class BoundConvolutions:
    """The arguments of the op for a chain of steps, from `bind`. Copies and pickles are bound again.

    Attributes:
        parts: the weights, scales, biases and vectors of all steps.
        layout: the kinds, indices of parts and windows of all steps.
        narrow: see `bind`.
        kept: the arguments stored in the library, or None without the library.
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


def bind(steps: Sequence[Step], *, narrow: bool) -> BoundConvolutions:
    """Collect the arguments of the steps once, so that a call passes only lists.

    Args:
        steps: the steps in order.
        narrow: pass images between steps in bfloat16 instead of the dtype of the input. bfloat16 and integer weights round them
            as coarsely anyway.

    Raises:
        ValueError: no steps, an unknown activation, or a step that reads the output of a later one.
    """
    if not steps:
        raise ValueError("steps=(): at least one convolution is required")
    parts: list[Tensor] = []

    def place(tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        parts.append(tensor.detach())
        return len(parts) - 1

    layout: list[int] = []
    weight: Tensor | None
    for number, step in enumerate(steps):
        for name in ("source", "residual"):
            image = getattr(step, name, None)
            if image is not None and not 0 <= image <= number:
                raise ValueError(
                    f"steps[{number}]: {name}={image}: must be one of the images 0 to {number}, computed before this step"
                )
        if isinstance(step, ConvolutionStep):
            check_activation(step.activation)
            bias = step.bias
            if step.is_grouped:
                bias = torch.zeros(step.weight.out_features) if bias is None else bias.float()
            weight, scale, range = step.weight.data, step.weight.scale, step.range
        else:
            activation = getattr(step, "activation", "none")
            if activation not in POINTWISE:
                raise ValueError(
                    f"steps[{number}]: activation={activation!r}: must be one of {', '.join(POINTWISE)}"
                )
            weight, bias = _vectors(step)
            scale = range = None
        step_layout = StepLayout(
            kind=STEP_KINDS.index(step.kind),
            weight=place(weight),
            scale=place(scale),
            bias=place(bias),
            range=place(None if range is None else torch.tensor(range, dtype=torch.float32)),
            **_images_and_window(step),
        )
        layout += numbers(step_layout)
    return BoundConvolutions(parts, layout, narrow)


def _vectors(step: Step) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias per channel of a step that is not a convolution."""
    if isinstance(step, AffineStep):
        return step.gain.float(), step.shift.float()
    return (torch.tensor(step.numbers, dtype=torch.int32) if isinstance(step, ChannelsStep) else None), None


def _images_and_window(step: Step) -> dict[str, Any]:
    """Return the fields of the layout from `source` on."""
    one, none = (1, 1), (0, 0)
    residual = getattr(step, "residual", None)
    windows = {"size": one, "stride": one, "padding": none, "dilation": one, "more": none}
    if isinstance(step, (ConvolutionStep, PoolingStep)):
        windows |= {"size": step.kernel_size, "stride": step.stride, "padding": step.padding}
    if isinstance(step, ConvolutionStep):
        windows |= {"dilation": step.dilation, "more": step.more}
    return {
        "source": step.source,
        "residual": -1 if residual is None else residual,
        "out_channels": step.weight.out_features if isinstance(step, ConvolutionStep) else step.channels,
        "activation": POINTWISE_ACTIVATIONS.index(getattr(step, "activation", "none")),
        **{name: SidesLayout(rows=rows, columns=columns) for name, (rows, columns) in windows.items()},
    }


def convolutions(input: Tensor, bound: BoundConvolutions) -> Tensor:
    """Run a chain of steps and return the output of the last one.

    Args:
        input: [B, C, H, W] float32 or bfloat16. channels_last is read without a copy, other orders are converted to it, except
            images with few channels, whose pixels are copied anyway.
        bound: from `bind`.

    Returns:
        [B, N, H', W'] in channels_last, dtype of the input.

    Raises:
        RuntimeError: the shapes do not fit.
    """
    rows, ops = input.permute(0, 2, 3, 1), torch.ops.hf_cpu_accel
    if bound.kept is None or is_tracing():  # graphs hold the arguments
        output = ops.convolutions(rows, bound.parts, bound.layout, bound.narrow)
    else:
        output = ops.kept_convolutions(rows, bound.kept.number)
    return output.permute(0, 3, 1, 2)


def _kept_reference(input: Tensor, number: int) -> Tensor:
    return chain_reference(input, _KEPT[number].parts, _KEPT[number].layout, _KEPT[number].narrow)


def _kept_fake(input: Tensor, number: int) -> Tensor:
    return input.new_empty(output_shape(input.shape, _KEPT[number].layout))


def _fake(input: Tensor, parts: list[Tensor], layout: list[int], narrow: bool) -> Tensor:
    return input.new_empty(output_shape(input.shape, layout))


declare(
    "convolutions(Tensor input, Tensor[] parts, int[] layout, bool narrow) -> Tensor",
    fake=_fake,
    reference=chain_reference,
)
declare("kept_convolutions(Tensor input, int number) -> Tensor", fake=_kept_fake, reference=_kept_reference)
