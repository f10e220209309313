"""state_space: a Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060) between its projections: convolution, recurrence and gated norm.

Per head, with a state S [head features, state features], dt = softplus(dt + dt_bias) within its bounds:

    S[t] = exp(-exp(A_log) dt) S[t-1] + dt x B^T,   y[t] = S[t] C + D x
    output = y / sqrt(mean(y^2) + eps) * norm_weight, multiplied by SiLU(gate) before or after the norm
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.recurrent.steps import causal_convolution, gated_norm, precision_of
from hf_cpu_accel.ops.registry import by_name, declare

SCHEMA = (
    "state_space(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor D, Tensor dt_bias, "
    "Tensor? norm_weight, float eps, int norm_groups, bool gate_first, float least_dt, float most_dt, Tensor? tokens, "
    "Tensor(a!) conv_state, Tensor(b!) state) -> Tensor"
)


@by_name(SCHEMA)
def state_space_reference(a: Any) -> Tensor:
    """Compute the op in PyTorch.

    Args:
        projected: [B, L, heads * P (the gate) + channels + heads (dt)], float32 or bfloat16, L at least 1. The channels are x
            [heads * P], B [groups * N] and C [groups * N].
        conv_weight: [channels, 1, taps], conv_bias: [channels] or None, A_log, D and dt_bias: [heads]; float32 or bfloat16.
        norm_weight: [heads * P] float32 or bfloat16, or None for no norm.
        norm_groups: the number of equal parts that are normalized separately.
        gate_first: whether the gate is applied before the norm.
        least_dt, most_dt: the bounds of dt, from 0 to infinity.
        tokens: bool [B, L], False where the output of the convolution is set to 0, or None.
        conv_state: [B, channels, taps] float32 or bfloat16, the last inputs of the convolution; written in place.
        state: [B, heads, P, N] float32, written in place.

    Returns:
        [B, L, heads * P] contiguous, dtype of projected.
    """
    precision = precision_of(a.projected)
    _, heads, head_dim, state_dim = a.state.shape
    channels, columns = a.conv_state.shape[1], heads * head_dim
    gate, mixed, dt = a.projected.to(precision).split([columns, channels, heads], dim=-1)
    mixed = torch.nn.functional.silu(causal_convolution(mixed, a.conv_weight, a.conv_bias, a.conv_state))
    if a.tokens is not None:
        mixed = mixed * a.tokens[..., None]
    shared = (channels - columns) // 2
    x, *parameters = mixed.split([columns, shared, shared], dim=-1)
    x = x.unflatten(-1, (heads, head_dim))
    repeats = heads * state_dim // shared
    B, C = (p.unflatten(-1, (-1, state_dim)).repeat_interleave(repeats, dim=2) for p in parameters)
    dt = torch.nn.functional.softplus(dt + a.dt_bias.to(precision)).clamp(a.least_dt, a.most_dt)
    decay, state, outputs = (
        (dt * -a.A_log.to(precision).exp()).exp()[..., None, None],
        a.state.to(precision),
        [],
    )
    for t in range(mixed.shape[1]):
        state = state * decay[:, t] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + a.D.to(precision)[:, None] * x[:, t])
    a.state.copy_(state)
    output = torch.stack(outputs, dim=1).flatten(2)
    output = gated_norm(output, gate, a.norm_weight, a.eps, a.norm_groups, gate_first=a.gate_first)
    return output.to(a.projected.dtype).contiguous()


def state_space_fake(projected: Tensor, *rest: Tensor) -> Tensor:
    _, heads, head_dim, _ = rest[-1].shape
    return projected.new_empty(*projected.shape[:2], heads * head_dim)


declare(SCHEMA, fake=state_space_fake, reference=state_space_reference)
