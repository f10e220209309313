"""Linear maps before and after aggregations. Their weights stay parameters, which may be trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn.dense import Linear

from hf_cpu_accel.lazy.remember import Memo
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear

_MAPPED_ANEW = 32 << 20  # bytes: larger tensors of torch are mapped by the system in every call, page by page
_packed = Memo(most=4096)  # more weights than models have


def are_plain(*linears: nn.Module | None) -> bool:
    """Whether a forward may compute with the weights of these: no hook or subclass sees them, and they have their shape."""
    return all(
        type(lin) is Linear
        and not isinstance(lin.weight, nn.UninitializedParameter)
        and not (lin._forward_hooks or lin._forward_pre_hooks)
        and not (lin._backward_hooks or lin._backward_pre_hooks)
        for lin in linears
        if lin is not None
    )


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias + addend. `addend` may be written over where no gradient is recorded.

    In float32 torch's BLAS serves it, which is as fast as our kernel, but for large outputs: ours takes them from its pool. In
    bfloat16 ours is faster.

    Args:
        x: [N, in_features].
        weight: [out_features, in_features]; its packed form is kept until it is written to.
        bias: [out_features].
        addend: [N, out_features].
    """
    given = [part for part in (x, weight, bias, addend) if part is not None]
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in given)
    if not learns and _is_ours(x, weight, given):
        return linear(x, _packed_weight(weight), bias, residual=addend)
    if addend is None:
        return F.linear(x, weight, bias)
    if learns or bias is not None or torch.compiler.is_compiling():
        return F.linear(x, weight, bias) + addend
    return addend.addmm_(x, weight.t())  # out of place it would copy the addend first


def apply_linear(lin: Linear, x: Tensor) -> Tensor:
    """lin(x), by `dense` if no hook or subclass sees `lin`."""
    return dense(x, lin.weight, lin.bias) if are_plain(lin) else lin(x)


def _is_ours(x: Tensor, weight: Tensor, given: list[Tensor]) -> bool:
    dtype = x.dtype
    gains = dtype is torch.bfloat16 or (
        dtype is torch.float32 and 4 * x.shape[0] * weight.shape[0] >= _MAPPED_ANEW
    )
    return (
        gains
        and all(part.dtype is dtype for part in given)
        and x.device.type == "cpu"
        and not weight.is_inference()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _packed_weight(weight: Tensor) -> PackedWeight:
    dtype = str(weight.dtype).removeprefix("torch.")
    return _packed.get(weight, None, lambda: pack_linear(weight.detach(), dtype), by_sample=True)
