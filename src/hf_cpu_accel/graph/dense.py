"""Linear maps before and after aggregations. Their weights stay parameters, which may be trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear

from hf_cpu_accel.lazy.remember import Memo
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear

_MAPPED_ANEW = 32 << 20  # bytes: the system maps larger tensors of torch again in every call, page by page
_packed = Memo(most=4096)  # more than the weights of a model


def are_plain(*linears: nn.Module | None) -> bool:
    """Return whether a forward may use the weights directly: initialized `Linear` layers without hooks; None is ignored."""
    return all(
        type(lin) is Linear
        and not isinstance(lin.weight, nn.UninitializedParameter)
        and not (lin._forward_hooks or lin._forward_pre_hooks)
        and not (lin._backward_hooks or lin._backward_pre_hooks)
        for lin in linears
        if lin is not None
    )


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """Compute x @ weight^T + bias + addend.

    In float32 torch's BLAS is as fast as the kernel, except for large outputs, which the kernel takes from its pool. In bfloat16
    the kernel is faster.

    Args:
        x: [N, in_features].
        weight: [out_features, in_features]; its packed form is cached until the weight is written to.
        bias: [out_features], or None.
        addend: [N, out_features], or None. Overwritten where no gradient is recorded.

    Returns:
        [N, out_features]. Differentiable.
    """
    inputs = [part for part in (x, weight, bias, addend) if part is not None]
    needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in inputs)
    if not needs_gradient and _runs_kernel(x, weight, inputs):
        return linear(x, _packed_weight(weight), bias, residual=addend)
    if addend is None:
        return F.linear(x, weight, bias)
    if needs_gradient or bias is not None or torch.compiler.is_compiling():
        return F.linear(x, weight, bias) + addend
    return addend.addmm_(x, weight.t())  # out of place it would copy the addend first


def apply_linear(lin: Linear, x: Tensor) -> Tensor:
    """Compute lin(x), by `dense` if `lin` is a `Linear` without hooks."""
    return dense(x, lin.weight, lin.bias) if are_plain(lin) else lin(x)


def _runs_kernel(x: Tensor, weight: Tensor, inputs: list[Tensor]) -> bool:
    dtype = x.dtype
    gains = dtype is torch.bfloat16 or (
        dtype is torch.float32 and 4 * x.shape[0] * weight.shape[0] >= _MAPPED_ANEW
    )
    return (
        gains
        and all(part.dtype is dtype for part in inputs)
        and x.device.type == "cpu"
        and not weight.is_inference()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _packed_weight(weight: Tensor) -> PackedWeight:
    dtype = str(weight.dtype).removeprefix("torch.")
    return _packed.get(weight, None, lambda: pack_linear(weight.detach(), dtype), by_sample=True)
