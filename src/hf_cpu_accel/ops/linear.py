"""linear: activation(input @ weight^T + bias) + residual, with a packed weight. linear_split: the same in several outputs.

- With int8 and int4 weights the input is rotated (rotation.py) and quantized per row in each call (W8A8, W4A8) over the row's range
  [min, max], extended to include 0: scale = (max - min) / 253, values round(x / scale) around a rounded zero point. Sums are exact
  in int32, so they are equal on every CPU.
- With "int8-weight" the input is quantized symmetrically to 16 bits.
- Rows with values beyond 2e37 may give NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare
from hf_cpu_accel.packing.affine import BITS
from hf_cpu_accel.packing.linear import PackedWeight, dtype_of, unpack_linear
from hf_cpu_accel.packing.rotation import rotate, rotate_back

MAX_SPLIT = 16  # the maximum number of outputs of linear_split
INPUT_STEPS = 253  # steps of the range of a row in 8 bits

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_tenth": lambda x: F.leaky_relu(x, 0.1),
}


def linear(
    input: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute activation(input @ weight^T + bias) + residual.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        weight: N x K, packed.
        bias: [N] float32 or bfloat16.
        activation: one of ACTIVATIONS.
        residual: [..., N] float32 or bfloat16, added after the activation.

    Returns:
        [..., N] contiguous, dtype of the input; sums are float32 (int32 for integer weights).

    Raises:
        ValueError: the shapes do not fit, or the activation is unknown.
        RuntimeError: a derivative with respect to an input is computed.
    """
    check_input(input, weight)
    check_activation(activation)
    refuse_derivatives("linear", input, bias, residual)
    return torch.ops.hf_cpu_accel.linear(
        input, weight.data, weight.scale, bias, residual, weight.out_features, activation
    )


def linear_split(
    input: Tensor, weight: PackedWeight, bias: Tensor | None, sizes: Sequence[int]
) -> list[Tensor]:
    """Compute input @ weight^T + bias with the output features split among tensors, such as query, key and value.

    Args:
        input: [..., K] float32 or bfloat16, any strides.
        weight: N x K, packed.
        bias: [N] or None.
        sizes: the features of each output, at most 16 outputs; all but the last are multiples of 32, their sum is N.

    Returns:
        One contiguous [..., size] per size, dtype of the input.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a size is not a multiple of 32, or a derivative with respect to an input is computed.
    """
    check_input(input, weight)
    if sum(sizes) != weight.out_features:
        raise ValueError(
            f"sizes={list(sizes)}: their sum must be {weight.out_features}, the weight's out_features"
        )
    refuse_derivatives("linear_split", input, bias)
    return torch.ops.hf_cpu_accel.linear_split(input, weight.data, weight.scale, bias, list(sizes))


def check_input(input: Tensor, weight: PackedWeight) -> None:
    if input.dim() == 0 or input.shape[-1] != weight.in_features:
        raise ValueError(
            f"input of shape {tuple(input.shape)}: the last dimension must be {weight.in_features}, the weight's in_features"
        )


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: must be one of {', '.join(ACTIVATIONS)}")


def linear_reference(
    input: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    activation: str,
) -> Tensor:
    """Compute the op in PyTorch: float32 arithmetic on the dequantized weight."""
    dtype = dtype_of(weight)
    full = unpack_linear(PackedWeight(weight, scale, input.shape[-1], out_features, dtype))
    x = input.float()
    if dtype in BITS:
        x = quantize_lines(x)
    elif scale is not None:
        x = quantize_rows(x, symmetric_16_bits=dtype == "int8-weight")
    output = ACTIVATIONS[activation](F.linear(x, full, None if bias is None else bias.float()))
    if residual is not None:
        output = output + residual.float()
    return output.to(input.dtype).contiguous()


def linear_split_reference(
    input: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, sizes: list[int]
) -> list[Tensor]:
    """Compute the op in PyTorch."""
    output = linear_reference(input, weight, scale, bias, None, sum(sizes), "none")
    return [part.clone(memory_format=torch.contiguous_format) for part in output.split(sizes, dim=-1)]


def quantize_rows(input: Tensor, *, symmetric_16_bits: bool = False) -> Tensor:
    """Round float32 [..., K] per row, and dequantize: to 8 bits over the range of the rotated row, or symmetrically to 16."""
    if input.shape[-1] == 0:
        return input
    input = rotate(input)
    if symmetric_16_bits:
        step = input.abs().amax(dim=-1, keepdim=True) / 32767
    else:
        low = input.amin(dim=-1, keepdim=True).clamp(max=0)
        step = (input.amax(dim=-1, keepdim=True).clamp(min=0) - low) / INPUT_STEPS
    rounded = torch.round(input / torch.where(step > 0, step, 1.0)) * step
    return rotate_back(torch.where(step > 0, rounded, input))


def quantize_lines(input: Tensor) -> Tensor:
    """Round float32 [..., K] symmetrically to 16 bits for each 64 features, and dequantize."""
    features = input.shape[-1]
    lines = F.pad(input, (0, -features % 64)).unflatten(-1, (-1, 64))
    step = lines.abs().amax(dim=-1, keepdim=True) / 32639  # 127 * 256 + 127
    rounded = torch.round(lines / torch.where(step > 0, step, 1.0)) * step
    return torch.where(step > 0, rounded, lines).flatten(-2)[..., :features]


def rows_fake(input: Tensor, *arguments: Any) -> Tensor:
    """Return an empty [..., out_features]: the fake kernel of ops whose arguments end with out_features and an activation."""
    return input.new_empty((*input.shape[:-1], arguments[-2]))


declare(
    "linear_split(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, int[] sizes) -> Tensor[]",
    fake=lambda input, weight, scale, bias, sizes: [rows_fake(input, size, "") for size in sizes],
    reference=linear_split_reference,
)
declare(
    "linear(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_features, "
    "str activation) -> Tensor",
    fake=rows_fake,
    reference=linear_reference,
)
