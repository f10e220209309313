"""causal_convolution and selective_scan: a Mamba mixer (Gu & Dao 2023, arXiv:2312.00752) between its projections.

x = SiLU(conv(input)), and projections of x are dt, B and C. Per channel, with a state S [state features] and dt = softplus(dt):

    S[t] = exp(-exp(A_log) dt) S[t-1] + dt x B,   y[t] = S[t] C + D x
    output = y * SiLU(gate)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.recurrent.steps import causal_convolution, precision_of
from hf_cpu_accel.ops.registry import by_name, declare

CONVOLUTION = (
    "causal_convolution(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor? tokens, Tensor(a!) conv_state) "
    "-> Tensor"
)
SCAN = (
    "selective_scan(Tensor x, Tensor dt, Tensor B, Tensor C, Tensor gate, Tensor A_log, Tensor D, Tensor(a!) state) "
    "-> Tensor"
)


@by_name(CONVOLUTION)
def causal_convolution_reference(a: Any) -> Tensor:
    """Compute the op in PyTorch.

    Args:
        input: [B, L, channels], float32 or bfloat16, L at least 1.
        conv_weight: [channels, 1, taps], conv_bias: [channels] or None; float32 or bfloat16.
        tokens: bool [B, L], False where the output is 0, or None.
        conv_state: [B, channels, taps] float32 or bfloat16, the last inputs; written in place.

    Returns:
        [B, L, channels] contiguous, float32.
    """
    input = a.input.to(precision_of(a.input))
    output = torch.nn.functional.silu(causal_convolution(input, a.conv_weight, a.conv_bias, a.conv_state))
    return (output if a.tokens is None else output * a.tokens[..., None]).contiguous()


def causal_convolution_fake(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape, dtype=torch.float32)


@by_name(SCAN)
def selective_scan_reference(a: Any) -> Tensor:
    """Compute the op in PyTorch.

    Args:
        x, dt, gate: [B, L, channels], L at least 1; B, C: [B, L, N]; float32 or bfloat16.
        A_log: [channels, N], D: [channels]; float32 or bfloat16.
        state: [B, channels, N] float32, written in place.

    Returns:
        [B, L, channels] contiguous, dtype of gate.
    """
    precision = precision_of(a.gate)
    x, dt, B, C, gate = (part.to(precision) for part in (a.x, a.dt, a.B, a.C, a.gate))
    A, D, dt = -a.A_log.to(precision).exp(), a.D.to(precision), torch.nn.functional.softplus(dt)
    state, outputs = a.state.to(precision), []
    for t in range(x.shape[1]):
        input = (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        state = state * (dt[:, t, :, None] * A).exp() + input
        outputs.append((state * C[:, t, None]).sum(-1) + D * x[:, t])
    a.state.copy_(state)
    output = torch.stack(outputs, dim=1) * torch.nn.functional.silu(gate)
    return output.to(a.gate.dtype).contiguous()


def selective_scan_fake(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, gate: Tensor, *_: object) -> Tensor:
    return gate.new_empty(gate.shape)


declare(CONVOLUTION, fake=causal_convolution_fake, reference=causal_convolution_reference)
declare(SCAN, fake=selective_scan_fake, reference=selective_scan_reference)
