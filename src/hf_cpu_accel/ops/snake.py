"""snake: x + scale sin(alpha x)^2 (Ziyin et al. 2020, arXiv:2006.08195), the activation of audio codecs and vocoders.

alpha and scale are one number per channel. scale is 1 / alpha in the paper, and 1 / beta with a second parameter beta in BigVGAN
(Lee et al. 2022, arXiv:2206.04658). Arithmetic is float32 for every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare, like_first


def snake(input: Tensor, alpha: Tensor, scale: Tensor, *, channels_last: bool = False) -> Tensor:
    """Compute x + scale sin(alpha x)^2 per channel.

    Args:
        input: [B, C, L], or [B, L, C] with channels_last, float32 or bfloat16, any strides.
        alpha, scale: [C] float32, contiguous.
        channels_last: whether channels are the last dimension.

    Returns:
        Shape and dtype of the input, contiguous.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a derivative with respect to an input is computed.
    """
    if input.dim() != 3:
        raise ValueError(f"input of shape {tuple(input.shape)}: must be [batch, channels, length]")
    channels = input.shape[2 if channels_last else 1]
    for name, numbers in (("alpha", alpha), ("scale", scale)):
        if numbers.shape != (channels,):
            raise ValueError(
                f"{name} of shape {tuple(numbers.shape)}: must be [{channels}], one for each channel"
            )
    refuse_derivatives("snake", input, alpha, scale)
    return torch.ops.hf_cpu_accel.snake(input, alpha, scale, channels_last)


def snake_reference(input: Tensor, alpha: Tensor, scale: Tensor, channels_last: bool) -> Tensor:
    """Compute the op in PyTorch, in float64 for float64 inputs, else in float32."""
    precision = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(precision)
    alpha, scale = (
        numbers.to(precision) if channels_last else numbers.to(precision)[:, None]
        for numbers in (alpha, scale)
    )
    return (x + scale * (alpha * x).sin().square()).to(input.dtype).contiguous()


declare(
    "snake(Tensor input, Tensor alpha, Tensor scale, bool channels_last) -> Tensor",
    fake=like_first,
    reference=snake_reference,
)
