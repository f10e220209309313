"""rotary_embedding: rotation of pairs of features by position (RoPE, Su et al. 2021, arXiv:2104.09864).

    halves:       out[i] = x[i] cos[i] - x[i + D/2] sin[i],     out[i + D/2] = x[i + D/2] cos[i + D/2] + x[i] sin[i + D/2]
    interleaved:  out[2i] = x[2i] cos[2i] - x[2i + 1] sin[2i],  out[2i + 1] = x[2i + 1] cos[2i + 1] + x[2i] sin[2i + 1]

Models write x * cos + rotate_half(x) * sin, which copies x. Arithmetic is float32 for every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare, like_first


def rotary_embedding(input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the heads of each token by its position.

    Args:
        input: [B, L, H, D] float32 or bfloat16, D even, any strides.
        cos, sin: [1 or B, L, D] float32 or bfloat16, dense last dimension.
        interleaved: pairs are features (2i, 2i + 1), as in GPT-J and Flux; otherwise (i, i + D/2), as in Llama.

    Returns:
        [B, L, H, D] contiguous, dtype of the input.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a derivative with respect to an input is computed.
    """
    if input.dim() != 4 or input.shape[3] % 2:
        raise ValueError(
            f"input of shape {tuple(input.shape)}: must be [batch, length, heads, an even number of features]"
        )
    batch, length, _, features = input.shape
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1:] != (length, features):
            raise ValueError(
                f"{name} of shape {tuple(table.shape)}: must be [1 or {batch}, {length}, {features}], "
                f"as the input is {tuple(input.shape)}"
            )
    refuse_derivatives("rotary_embedding", input, cos, sin)
    return torch.ops.hf_cpu_accel.rotary_embedding(input, cos, sin, interleaved)


def rotary_embedding_reference(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute the op in PyTorch, in float64 for float64 inputs, else in float32."""
    precision = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(precision)
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        low, high = x.chunk(2, dim=-1)
        rotated = torch.cat((-high, low), dim=-1)
    cos, sin = (table.to(precision).unsqueeze(2) for table in (cos, sin))
    return (x * cos + rotated * sin).to(input.dtype).contiguous()


declare(
    "rotary_embedding(Tensor input, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    fake=like_first,
    reference=rotary_embedding_reference,
)
