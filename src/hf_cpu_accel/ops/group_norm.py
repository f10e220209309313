"""group_norm: group normalization of images, with a SiLU in the same pass over memory.

    (x - mean) / sqrt(var + eps) * weight + bias          Wu & He 2018, arXiv:1803.08494

with mean and variance over the pixels and channels of a group of one image. Statistics and arithmetic are float32 for every input
dtype; the variance is the biased one, as in `torch.nn.GroupNorm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare

ACTIVATIONS = ("none", "silu")


def group_norm(
    input: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    activation: str = "none",
) -> Tensor:
    """Compute activation((x - mean) / sqrt(var + eps) * weight + bias) with the mean and variance of each group of channels.

    Args:
        input: [N, C, *] float32 or bfloat16. Contiguous or channels_last (also a transposed [N, *, C]) is read without a copy.
        groups: the number of groups, a divisor of C.
        weight, bias: [C] float32 or bfloat16 (not necessarily the input's dtype), or None for ones and zeros.
        eps: added to the variance.
        activation: "none" or "silu".

    Returns:
        [N, C, *], dtype and layout of the input.

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
        RuntimeError: a derivative with respect to an input is computed.
    """
    if input.dim() < 2:
        raise ValueError(f"input of shape {tuple(input.shape)}: must be [images, channels, *]")
    channels = input.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(f"groups={groups}: must divide the {channels} channels of the input")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (channels,):
            raise ValueError(
                f"{name} of shape {tuple(vector.shape)}: must be ({channels},), the input's channels"
            )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: must be one of {ACTIVATIONS}")
    refuse_derivatives("group_norm", input, weight, bias)
    return torch.ops.hf_cpu_accel.group_norm(input, groups, weight, bias, eps, activation)


def group_norm_reference(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> Tensor:
    """Compute the op in PyTorch."""
    x = input.float().unflatten(1, (groups, -1)).flatten(2)
    x = x - x.mean(dim=-1, keepdim=True)
    x = x - x.mean(dim=-1, keepdim=True)  # the low part of the mean, as in the kernel
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    output = x.reshape(input.shape)
    per_channel = (-1, *[1] * (input.dim() - 2))
    if weight is not None:
        output = output * weight.float().view(per_channel)
    if bias is not None:
        output = output + bias.float().view(per_channel)
    output = functional.silu(output) if activation == "silu" else output
    return _like(input).copy_(output)


def _like(input: Tensor) -> Tensor:
    """An empty tensor in the layout of `input`, or a contiguous one if that is not dense."""
    if not input.is_contiguous() and input.movedim(1, -1).is_contiguous():
        return input.new_empty(input.movedim(1, -1).shape).movedim(-1, 1)
    return input.new_empty(input.shape)


declare(
    "group_norm(Tensor input, int groups, Tensor? weight, Tensor? bias, float eps, str activation) -> Tensor",
    fake=lambda input, *_: _like(input),
    reference=group_norm_reference,
)
