"""gated_delta_net: linear attention with the gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464), as in Qwen3.5 and
Qwen3-Next, between its projections: convolution, recurrence and gated norm.

Per head, with a state S [key features, value features], q and k of length 1 (q divided by the root of its features besides):

    S[t] = g S[t-1] + k (beta (v - k (g S[t-1])))^T        g = exp(-exp(A_log) softplus(decay + dt_bias)), beta = sigmoid(beta)
    o[t] = q S[t]
    output = o / sqrt(mean(o^2) + eps) * norm_weight * SiLU(gate)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.recurrent.steps import causal_convolution, gated_norm, precision_of
from hf_cpu_accel.ops.registry import by_name, declare

SCHEMA = (
    "gated_delta_net(Tensor query_key_value, Tensor gate, Tensor decay, Tensor beta, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor A_log, Tensor dt_bias, Tensor norm_weight, float eps, Tensor(a!) conv_state, Tensor(b!) state) -> Tensor"
)


@by_name(SCHEMA)
def gated_delta_net_reference(a: Any) -> Tensor:
    """Compute the op in PyTorch.

    Args:
        query_key_value: [B, L, 2 * key_heads * D + heads * E], L at least 1, float32 or bfloat16.
        gate: [B, L, heads * E].
        decay, beta: [B, L, heads].
        conv_weight: [channels, 1, taps], conv_bias: [channels] or None, A_log and dt_bias: [heads], norm_weight: [E]; float32 or
            bfloat16.
        conv_state: [B, channels, taps] float32 or bfloat16, the last inputs of the convolution; updated in place.
        state: [B, heads, D, E] float32, updated in place. `heads / key_heads` consecutive heads share a key.

    Returns:
        [B, L, heads * E] contiguous, dtype of query_key_value.
    """
    precision = precision_of(a.query_key_value)
    _, heads, key_dim, value_dim = a.state.shape
    mixed = causal_convolution(a.query_key_value.to(precision), a.conv_weight, a.conv_bias, a.conv_state)
    mixed = torch.nn.functional.silu(mixed)
    values = heads * value_dim
    keys = (mixed.shape[2] - values) // 2
    query, key, value = mixed.split([keys, keys, values], dim=-1)
    repeats = heads * key_dim // keys
    query, key = (
        _normalized(part.unflatten(-1, (-1, key_dim)).repeat_interleave(repeats, dim=2))
        for part in (query, key)
    )
    query, value = query * key_dim**-0.5, value.unflatten(-1, (heads, value_dim))
    steps = torch.nn.functional.softplus(a.decay.to(precision) + a.dt_bias.to(precision))
    g = (-a.A_log.to(precision).exp() * steps).exp()[..., None, None]
    beta = a.beta.to(precision).sigmoid()[..., None]
    state, outputs = a.state.to(precision), []
    for t in range(mixed.shape[1]):
        state = state * g[:, t]
        change = (value[:, t] - torch.einsum("bhd,bhde->bhe", key[:, t], state)) * beta[:, t]
        state = state + key[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhd,bhde->bhe", query[:, t], state))
    a.state.copy_(state)
    output = torch.stack(outputs, dim=1).flatten(2)
    weight = a.norm_weight.repeat(heads)
    output = gated_norm(output, a.gate.to(precision), weight, a.eps, heads, gate_first=False)
    return output.to(a.query_key_value.dtype).contiguous()


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_net_fake(query_key_value: Tensor, gate: Tensor, *_: object) -> Tensor:
    return query_key_value.new_empty(gate.shape)


declare(SCHEMA, fake=gated_delta_net_fake, reference=gated_delta_net_reference)
