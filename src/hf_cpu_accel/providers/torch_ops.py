"""The other providers of a linear layer: oneDNN and torch's BLAS. All unstable op names of torch are in this file.

Each uses the values of the packed weight (exact for float32, the same rounding for bfloat16 and int8). So a change of provider
changes the summation order and output rounding, not the quantization. Not used are:

- `quantized::linear_dynamic` (FBGEMM), which quantizes the input per tensor: one large token reduces the precision of all others
  below the accuracy limits;
- `torch._weight_int8pack_mm`, which is slow for more than one row;
- MKL's packed weights (`mkl::_mkl_linear`), which are for one row count each and need the plain weight too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.check import compare
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear, unpack_values
from hf_cpu_accel.packing.rotation import rotate
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.tolerance import PROVIDER

# (input [..., K] float32 or bfloat16, bias [N] or None) -> [..., N] in the input's dtype
Multiply = Callable[[Tensor, Tensor | None], Tensor]

_PROBE_SHAPE = (17, 96, 208)  # M, N, K: more than a block of the rotation


@dataclass(frozen=True)
class ProviderWeight:
    """A provider's copy of a weight.

    Attributes:
        multiply: (input, bias) -> input @ weight^T + bias.
        nbytes: the memory of the copy.
    """

    multiply: Multiply
    nbytes: int


@dataclass(frozen=True)
class Provider:
    """Another implementation of `linear`.

    Attributes:
        name: for reports and files.
        dtype: the dtype of its weights: "float32", "bfloat16" or "int8".
        prepare: (packed weight, its values [N, K] in its dtype) -> the provider's copy.
        wanted: whether it can be faster on this CPU at all, to save measurements.
    """

    name: str
    dtype: str
    prepare: Callable[[PackedWeight, Tensor], ProviderWeight]
    wanted: Callable[[], bool] = lambda: True

    def works(self) -> bool:
        """Return whether this torch has its ops, and they compute the right results."""
        return _works(self)


@cache
def _works(provider: Provider) -> bool:
    rows, out_features, in_features = _PROBE_SHAPE
    generator = torch.Generator().manual_seed(0)
    weight, bias, input = (
        torch.randn(shape, generator=generator)
        for shape in ((out_features, in_features), (out_features,), (rows, in_features))
    )
    packed = pack_linear(weight, provider.dtype)
    try:
        with torch.no_grad():
            output = provider.prepare(packed, unpack_values(packed)).multiply(input, bias)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the op is not in this torch, has another signature, or is not built for this CPU
    expected = F.linear(input.double(), unpack_linear(packed).double(), bias.double())
    return output.dtype is input.dtype and compare(output, expected).within(PROVIDER.of(provider.dtype))


def candidates(dtype: str) -> tuple[Provider, ...]:
    """Return the providers for weights of `dtype` that work and can be faster on this CPU."""
    return tuple(p for p in PROVIDERS if p.dtype == dtype and p.wanted() and p.works())


def provider_named(name: str, dtype: str) -> Provider | None:
    """Return the provider of that name for weights of `dtype`; None if it does not exist or does not work here."""
    return next((p for p in PROVIDERS if (p.name, p.dtype) == (name, dtype) and p.works()), None)


def _onednn(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """Prepare oneDNN's product with a weight in its blocked layout; bfloat16 outputs are rounded, as in torch."""
    dtype = values.dtype
    weight = torch.ops.mkldnn._reorder_linear_weight(values, None)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(input: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(dtype)
        return pointwise(input.to(dtype), weight, bias, "none", [], "").to(input.dtype)

    return ProviderWeight(multiply, values.nbytes)


def _blas(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """Prepare the product of `nn.Linear`: torch's BLAS on the plain weight."""

    def multiply(input: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input.float(), values, None if bias is None else bias.float()).to(input.dtype)

    return ProviderWeight(multiply, values.nbytes)


def _onednn_int8(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """Prepare oneDNN's u8 x s8 product, with the input rotated and quantized per row by torch ops as in `ops.linear`.

    With q = round(x / step) + zero the sum is step * w_step * (q @ w^T - zero * sum(w)). oneDNN computes w_step * (q @ w^T), and a
    product of rank 2 adds the zero point and the bias.
    """
    assert packed.scale is not None
    out_features = packed.out_features
    weight = torch.ops.onednn.qlinear_prepack(values, None)
    step = packed.scale[0].contiguous()
    zero_points = torch.zeros(out_features, dtype=torch.int64)
    correction = packed.scale.prod(dim=0)
    pointwise = torch.ops.onednn.qlinear_pointwise.default

    def multiply(input: Tensor, bias: Tensor | None) -> Tensor:
        rows = rotate(input.reshape(-1, input.shape[-1]).float())
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        row_step = (high - low) / 253
        inverse = torch.where(row_step > 0, row_step.reciprocal(), 0)
        zero = torch.round(-low * inverse)
        values = torch.round(rows * inverse).add_(zero).to(torch.uint8)
        sums = pointwise(
            values, 1.0, 0, weight, step, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        sums.mul_(row_step)
        left, right = -zero * row_step, correction[None]
        if bias is not None:
            left, right = (
                torch.cat([left, torch.ones_like(left)], dim=1),
                torch.stack([correction, bias.float()]),
            )
        return sums.addmm_(left, right).view(*input.shape[:-1], out_features).to(input.dtype)

    nbytes = values.nbytes + step.nbytes + zero_points.nbytes + correction.nbytes
    return ProviderWeight(multiply, nbytes)


def _has_amx() -> bool:
    # Without AMX, oneDNN's int8 product alone takes as long as the whole op of this package.
    return {"amx_tile", "amx_int8"} <= hardware.detect().flags


PROVIDERS = (
    Provider("BLAS", "float32", _blas),  # first: it keeps the unpacked values for the next
    Provider("oneDNN", "float32", _onednn),
    Provider("oneDNN", "bfloat16", _onednn),
    Provider("oneDNN", "int8", _onednn_int8, wanted=_has_amx),
)
