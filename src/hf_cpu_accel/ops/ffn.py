"""ffn: the two linear layers of a transformer block with the activation between them. gated_ffn: the same with a gate (Shazeer
2020, arXiv:2002.05202).

The intermediate [..., intermediate_features] is never a tensor: it stays in the kernel's workspace in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation, check_input, linear_reference, rows_fake
from hf_cpu_accel.ops.registry import by_name, declare
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
    """Compute activation(input @ up^T + up_bias) @ down^T + down_bias + residual.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        up: I x K, packed; down: N x I, packed.
        up_bias, down_bias: [I] and [N], float32 or bfloat16, or None.
        activation: one of `ops.linear.ACTIVATIONS`.
        residual: [..., N] or None.

    Returns:
        [..., N] contiguous, dtype of the input.

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
        RuntimeError: a derivative with respect to an input is computed.
    """
    check_input(input, up)
    check_activation(activation)
    if down.in_features != up.out_features:
        raise ValueError(
            f"down has {down.in_features} input features, up has {up.out_features} output features: must be equal"
        )
    weights = (up.data, up.scale, up_bias, down.data, down.scale, down_bias)
    sizes = (down.in_features, down.out_features)
    refuse_derivatives("ffn", input, up_bias, down_bias, residual)
    return torch.ops.hf_cpu_accel.ffn(input, *weights, residual, *sizes, activation)


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
    """Compute (activation(gate) * value) @ down^T + down_bias + residual; gate and value are the halves of input @ up^T + up_bias.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        up: 2I x K, packed, the rows of the gate before those of the value; I is a multiple of 32.
        down: N x I, packed.
        up_bias, down_bias: [2I] and [N], float32 or bfloat16, or None.
        activation: one of `ops.linear.ACTIVATIONS`.
        residual: [..., N] or None.
        gate_last: the rows of the gate come after those of the value.

    Returns:
        [..., N] contiguous, dtype of the input.

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
        RuntimeError: a derivative with respect to an input is computed.
    """
    check_input(input, up)
    check_activation(activation)
    if 2 * down.in_features != up.out_features or down.in_features % PANEL_FEATURES:
        raise ValueError(
            f"up has {up.out_features} output features, down has {down.in_features} input features: up must have twice as "
            f"many as down, and down a multiple of {PANEL_FEATURES}"
        )
    weights = (up.data, up.scale, up_bias, down.data, down.scale, down_bias)
    sizes = (down.in_features, down.out_features)
    refuse_derivatives("gated_ffn", input, up_bias, down_bias, residual)
    return torch.ops.hf_cpu_accel.gated_ffn(input, *weights, residual, *sizes, activation, gate_last)


_ARGUMENTS = (
    "(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, "
    "Tensor? down_bias, Tensor? residual, SymInt intermediate_features, SymInt out_features, "
    "str activation"
)
_FFN = f"ffn{_ARGUMENTS}) -> Tensor"
_GATED_FFN = f"gated_ffn{_ARGUMENTS}, bool gate_last=False) -> Tensor"


@by_name(_FFN)
def ffn_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, with float32 between the layers."""
    return _down(given, ACTIVATIONS[given.activation](_up(given, given.intermediate_features)))


@by_name(_GATED_FFN)
def gated_ffn_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, with float32 between the layers."""
    halves = _up(given, 2 * given.intermediate_features).chunk(2, dim=-1)
    gate, value = halves[:: -1 if given.gate_last else 1]
    return _down(given, ACTIVATIONS[given.activation](gate) * value)


def _up(given: Any, features: int) -> Tensor:
    input = given.input.float()
    return linear_reference(input, given.up, given.up_scale, given.up_bias, None, features, "none")


def _down(given: Any, hidden: Tensor) -> Tensor:
    weight = (given.down, given.down_scale, given.down_bias)
    output = linear_reference(hidden, *weight, given.residual, given.out_features, "none")
    return output.to(given.input.dtype)


declare(_FFN, fake=rows_fake, reference=ffn_reference)
declare(
    _GATED_FFN,
    fake=lambda input, *arguments: rows_fake(input, *arguments[:10]),
    reference=gated_ffn_reference,
)
