"""ffn: the two linear layers of a transformer block with the activation between them, in one call.

The intermediate [..., intermediate_features] never becomes a tensor: it lives in the kernel's workspace in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import PackedWeight
from .linear import check_activation, check_input, linear_reference, rows_fake
from .registry import declare


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
    return torch.ops.hf_cpu_accel.ffn(
        input,
        up.data,
        up.scale,
        up_bias,
        down.data,
        down.scale,
        down_bias,
        residual,
        up.out_features,
        down.out_features,
        activation,
    )


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
) -> Tensor:
    """The op in plain torch, float32 between the layers."""
    hidden = linear_reference(input.float(), up, up_scale, up_bias, None, intermediate_features, activation)
    output = linear_reference(hidden, down, down_scale, down_bias, residual, out_features, "none")
    return output.to(input.dtype)


declare(
    "ffn(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, "
    "Tensor? down_bias, Tensor? residual, SymInt intermediate_features, SymInt out_features, "
    "str activation) -> Tensor",
    fake=rows_fake,
    reference=ffn_reference,
)
