"""Parts of the references of recurrent layers in PyTorch: causal convolutions over time and the gated norm."""

from __future__ import annotations

import torch
from torch import Tensor


def precision_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def causal_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    """Compute y[t] = sum over k of weight[:, 0, k] input[t - taps + 1 + k] + bias, channel by channel.

    Args:
        input: [B, L, C].
        weight: [C, 1, taps], as in `torch.nn.Conv1d`.
        bias: [C] or None.
        state: [B, C, taps], the inputs before `input`; updated in place.

    Returns:
        [B, L, C]
    """
    taps, length = weight.shape[2], input.shape[1]
    inputs = torch.cat([state.to(input.dtype).transpose(1, 2), input], dim=1)
    state.copy_(inputs[:, -taps:].transpose(1, 2))
    first = inputs.shape[1] - length - taps + 1
    output = sum(
        inputs[:, first + k : first + k + length] * weight[:, 0, k].to(input.dtype) for k in range(taps)
    )
    assert isinstance(output, Tensor)
    return output if bias is None else output + bias.to(input.dtype)


def gated_norm(
    input: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int, *, gate_first: bool
) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * SiLU(gate), with the mean over each of `groups` parts of the last dimension.

    Args:
        input, gate: [..., C].
        weight: [C], or None: no norm.
        gate_first: whether x is input * SiLU(gate), without a gate after the norm.
    """
    gate = torch.nn.functional.silu(gate)
    if gate_first:
        input = input * gate
    if weight is not None:
        parts = input.unflatten(-1, (groups, -1))
        input = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
        input = input * weight.to(input.dtype)
    return input if gate_first else input * gate
