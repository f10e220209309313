"""Norms over the last dimension, alone or after a residual addition (one pass over memory instead of two).

    layer_norm: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      Ba et al. 2016, arXiv:1607.06450
    rms_norm:   x / sqrt(mean(x^2) + eps) * weight                      Zhang & Sennrich 2019, arXiv:1910.07467

Statistics and arithmetic are float32 for every input dtype; the variance is the biased one, as in `torch.nn.LayerNorm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.registry import declare, like_first


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension.

    Args:
        input: [..., C] float32 or bfloat16, any strides.
        weight, bias: [C] float32 or bfloat16 (not necessarily the input's dtype), or None for ones and zeros.
        eps: added to the variance.

    Returns:
        [..., C] contiguous, dtype of the input.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a derivative with respect to an input is computed.
    """
    _check(input, weight=weight, bias=bias)
    refuse_derivatives("layer_norm", input, weight, bias)
    return torch.ops.hf_cpu_accel.layer_norm(input, weight, bias, eps)


def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension; arguments, result and errors as in `layer_norm`."""
    _check(input, weight=weight)
    refuse_derivatives("rms_norm", input, weight)
    return torch.ops.hf_cpu_accel.rms_norm(input, weight, eps)


def add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute (layer_norm(sum), sum) with sum = input + residual.

    Args:
        input, weight, bias, eps: as in `layer_norm`.
        residual: shape of the input, float32 or bfloat16.

    Returns:
        Both in the shape and dtype of the input, contiguous. For bfloat16 the norm reads the sum before it is rounded.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a derivative with respect to an input is computed.
    """
    _check(input, residual, weight=weight, bias=bias)
    refuse_derivatives("add_layer_norm", input, residual, weight, bias)
    return torch.ops.hf_cpu_accel.add_layer_norm(input, residual, weight, bias, eps)


def add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute (rms_norm(sum), sum) with sum = input + residual; arguments, result and errors as in `add_layer_norm`."""
    _check(input, residual, weight=weight)
    refuse_derivatives("add_rms_norm", input, residual, weight)
    return torch.ops.hf_cpu_accel.add_rms_norm(input, residual, weight, eps)


def _check(input: Tensor, residual: Tensor | None = None, **vectors: Tensor | None) -> None:
    if input.dim() == 0:
        raise ValueError(
            "input of shape (): a norm needs at least one dimension; pass input[None] for a single value"
        )
    if residual is not None and residual.shape != input.shape:
        raise ValueError(
            f"residual of shape {tuple(residual.shape)}: must be {tuple(input.shape)}, the input's; "
            "expand it first if it is to be broadcast"
        )
    for name, vector in vectors.items():
        if vector is not None and vector.shape != input.shape[-1:]:
            raise ValueError(
                f"{name} of shape {tuple(vector.shape)}: must be ({input.shape[-1]},), the input's last dimension"
            )


def layer_norm_reference(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the op in PyTorch."""
    return _normalize(input.float(), weight, bias, eps, centered=True).to(input.dtype)


def rms_norm_reference(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute the op in PyTorch."""
    return _normalize(input.float(), weight, None, eps, centered=False).to(input.dtype)


def add_layer_norm_reference(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op in PyTorch."""
    total = input.float() + residual.float()
    return _normalize(total, weight, bias, eps, centered=True).to(input.dtype), _fresh(total, input)


def add_rms_norm_reference(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op in PyTorch."""
    total = input.float() + residual.float()
    return _normalize(total, weight, None, eps, centered=False).to(input.dtype), _fresh(total, input)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centered: bool
) -> Tensor:
    if centered:
        x = x - x.mean(dim=-1, keepdim=True)
        x = x - x.mean(dim=-1, keepdim=True)  # the low part of the mean, as in the kernel
    output = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        output = output * weight.float()
    if bias is not None:
        output = output + bias.float()
    return output.contiguous()


def _fresh(total: Tensor, input: Tensor) -> Tensor:
    return total.to(input.dtype).contiguous()


declare(
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    fake=like_first,
    reference=layer_norm_reference,
)
declare(
    "rms_norm(Tensor input, Tensor? weight, float eps) -> Tensor",
    fake=like_first,
    reference=rms_norm_reference,
)
declare(
    "add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    fake=lambda input, *_: (like_first(input), like_first(input)),
    reference=add_layer_norm_reference,
)
declare(
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)",
    fake=lambda input, *_: (like_first(input), like_first(input)),
    reference=add_rms_norm_reference,
)
