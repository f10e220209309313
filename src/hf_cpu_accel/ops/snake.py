"""snake: x + scale sin(alpha x)^2 (Ziyin et al. 2020, arXiv:2006.08195), the activation of codecs of sound and of vocoders.

alpha and scale are one number for each channel. In the paper scale is 1 / alpha, in BigVGAN (Lee et al. 2022,
arXiv:2206.04658) 1 over a second parameter. Arithmetic is float32 for every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare, like_first


def snake(input: Tensor, alpha: Tensor, scale: Tensor, *, channels_last: bool = False) -> Tensor:
    """The activation of sound.

    Args:
        input: [B, C, L], or [B, L, C] with channels_last, float32 or bfloat16, any strides.
        alpha, scale: [C] float32, contiguous.

    Returns:
        As the input, contiguous.

    Raises:
        ValueError: if the shapes do not fit.
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
    """The op in plain torch; float64 inputs are computed in float64, others in float32."""
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
