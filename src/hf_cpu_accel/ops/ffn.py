"""ffn: the two linear layers of a transformer block with the activation between them, in one call; gated_ffn: the same with a gate
(Shazeer 2020, arXiv:2002.05202).

The intermediate [..., intermediate_features] never becomes a tensor: it lives in the kernel's workspace in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation, check_input, linear_reference, rows_fake
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing.linear import PANEL_FEATURES, PackedWeight


def ffn(
    input: Tensor,
    up: PackedWeight,
    up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    *,
    activation: str,
    residual: Tensor | None = None,
) -> Tensor:
    """activation(input @ up^T + up_bias) @ down^T + down_bias + residual.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        up: I x K, packed; down: N x I, packed.
        up_bias, down_bias: [I] and [N], float32 or bfloat16, or None.
        activation: one of `ops.linear.ACTIVATIONS`.
        residual: [..., N] or None.

    Returns:
        [..., N] contiguous, dtype of the input.

    Raises:
        ValueError: if the shapes do not fit or the activation is unknown.
    """
    check_input(input, up)
    check_activation(activation)
    if down.in_features != up.out_features:
        raise ValueError(f"down takes {down.in_features} features but up gives {up.out_features}")
    op = torch.ops.hf_cpu_accel.ffn
    return _call(op, input, up, up_bias, down, down_bias, activation=activation, residual=residual)


def gated_ffn(
    input: Tensor,
    up: PackedWeight,
    up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    *,
    activation: str,
    residual: Tensor | None = None,
    gate_last: bool = False,
) -> Tensor:
    """(activation(gate) * value) @ down^T + down_bias + residual, gate and value being the halves of input @ up^T + up_bias.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        up: 2I x K, packed, the gate's rows first, or with `gate_last` behind the value's; I is a multiple of 32.
        down: N x I, packed.
        up_bias, down_bias: [2I] and [N], float32 or bfloat16, or None.
        activation: one of `ops.linear.ACTIVATIONS`.
        residual: [..., N] or None.

    Returns:
        [..., N] contiguous, dtype of the input.

    Raises:
        ValueError: if the shapes do not fit or the activation is unknown.
    """
    check_input(input, up)
    check_activation(activation)
    if 2 * down.in_features != up.out_features or down.in_features % PANEL_FEATURES:
        raise ValueError(
            f"up gives {up.out_features} features and down takes {down.in_features}: accepted are twice as many, "
            f"and multiples of {PANEL_FEATURES}"
        )
    op = torch.ops.hf_cpu_accel.gated_ffn
    return _call(op, input, up, up_bias, down, down_bias, gate_last, activation=activation, residual=residual)


def _call(
    op: Callable[..., Tensor],
    input: Tensor,
    up: PackedWeight,
    up_bias: Tensor | None,
    down: PackedWeight,
    down_bias: Tensor | None,
    *gate_last: bool,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    weights = (up.data, up.scale, up_bias, down.data, down.scale, down_bias)
    return op(input, *weights, residual, down.in_features, down.out_features, activation, *gate_last)


def ffn_reference(
    input: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    residual: Tensor | None,
    intermediate_features: int,
    out_features: int,
    activation: str,
    gate_last: bool = False,
    *,
    gated: bool = False,
) -> Tensor:
    """Both ops in plain torch, float32 between the layers."""
    up_features = (2 if gated else 1) * intermediate_features
    hidden = linear_reference(input.float(), up, up_scale, up_bias, None, up_features, "none")
    gate, *value = hidden.chunk(2, dim=-1)[:: -1 if gate_last else 1] if gated else (hidden,)
    hidden = ACTIVATIONS[activation](gate)
    hidden = hidden * value[0] if gated else hidden
    output = linear_reference(hidden, down, down_scale, down_bias, residual, out_features, "none")
    return output.to(input.dtype)


gated_ffn_reference = partial(ffn_reference, gated=True)

_ARGUMENTS = (
    "(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, "
    "Tensor? down_bias, Tensor? residual, SymInt intermediate_features, SymInt out_features, "
    "str activation"
)
declare(f"ffn{_ARGUMENTS}) -> Tensor", fake=rows_fake, reference=ffn_reference)
declare(
    f"gated_ffn{_ARGUMENTS}, bool gate_last=False) -> Tensor",
    fake=lambda input, *arguments: rows_fake(input, *arguments[:10]),
    reference=gated_ffn_reference,
)
