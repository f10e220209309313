"""short_convolution: the convolution layers of LFM2 between their two projections (Liquid AI 2025, arXiv:2511.23404).

output = C * conv(B * x) for the three parts B, C, x of the input; conv is causal and depthwise
"""

from __future__ import annotations

from torch import Tensor

from hf_cpu_accel.ops.recurrent.steps import causal_convolution, precision_of
from hf_cpu_accel.ops.registry import declare


def short_convolution_reference(
    input: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, conv_state: Tensor
) -> Tensor:
    """Compute the op in PyTorch.

    Args:
        input: [B, L, 3 * C], L at least 1, float32 or bfloat16.
        conv_weight: [C, 1, taps], conv_bias: [C] or None; float32 or bfloat16.
        conv_state: [B, C, taps] float32 or bfloat16, the last products B * x before the first token (initially zeros); updated in
            place.

    Returns:
        [B, L, C] contiguous, dtype of the input.
    """
    precision = precision_of(input)
    gate, after, x = input.to(precision).chunk(3, dim=-1)
    output = causal_convolution(gate * x, conv_weight, conv_bias, conv_state) * after
    return output.to(input.dtype).contiguous()


def short_convolution_fake(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(*input.shape[:2], input.shape[2] // 3)


declare(
    "short_convolution(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state) -> Tensor",
    fake=short_convolution_fake,
    reference=short_convolution_reference,
)
