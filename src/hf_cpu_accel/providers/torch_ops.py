"""The other providers of a linear layer: oneDNN and the BLAS that torch was built with. All unstable op names of torch are here.

Each takes the values of our packed weight as they are (exact for float32, the same rounding for bfloat16 and int8), so a change of
provider changes summation order and output rounding, not the scheme. What is not here, and why:

- `quantized::linear_dynamic` (FBGEMM) quantizes the input per tensor: one large token costs all others their bits, and our accuracy
  bars do not hold.
- `torch._weight_int8pack_mm` falls apart beyond one row.
- MKL's packed weights (`mkl::_mkl_linear`) serve one row count each and want the plain weight beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear, unpack_values
from hf_cpu_accel.packing.rotation import rotate
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.tolerance import PROVIDER

# (input [..., K] float32 or bfloat16, bias [N] or None) -> [..., N] in the input's dtype
Multiply = Callable[[Tensor, Tensor | None], Tensor]

_PROBE_SHAPE = (17, 96, 208)  # M, N, K: more than a block of the rotation


@dataclass(frozen=True)
class ProviderWeight:
    """A provider's own copy of a weight.

    Attributes:
        multiply: (input, bias) -> input @ weight^T + bias.
        nbytes: memory that the copy takes.
    """

    multiply: Multiply
    nbytes: int


@dataclass(frozen=True)
class Provider:
    """Another implementation of `linear`.

    Attributes:
        name: for people and files.
        dtype: of the weights that it takes: "float32", "bfloat16" or "int8".
        prepare: (packed weight, its values [N, K] in its dtype) -> the copy that it multiplies by.
        wanted: whether it may be ahead of us on this CPU at all; measuring what cannot win costs time.
    """

    name: str
    dtype: str
    prepare: Callable[[PackedWeight, Tensor], ProviderWeight]
    wanted: Callable[[], bool] = lambda: True

    def works(self) -> bool:
        """Whether this torch has its ops, and they compute what they should."""
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
            given = provider.prepare(packed, unpack_values(packed)).multiply(input, bias)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # the op is not in this torch, has another signature, or is not built for this CPU
    expected = F.linear(input.double(), unpack_linear(packed).double(), bias.double())
    if given.shape != expected.shape or given.dtype != input.dtype:
        return False
    error = (given.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool(error.max() <= PROVIDER.of(provider.dtype))


def candidates(dtype: str) -> tuple[Provider, ...]:
    """Those that can multiply by weights of `dtype` here, and may be worth it."""
    return tuple(p for p in PROVIDERS if p.dtype == dtype and p.wanted() and p.works())


def provider_named(name: str, dtype: str) -> Provider | None:
    """The provider of that name for weights of `dtype`, None if it does not exist or does not work here."""
    return next((p for p in PROVIDERS if (p.name, p.dtype) == (name, dtype) and p.works()), None)


def _onednn(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """oneDNN on a weight in its own blocked layout; bfloat16 outputs are rounded to bfloat16, as torch's own are."""
    dtype = values.dtype
    weight = torch.ops.mkldnn._reorder_linear_weight(values, None)
    pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(input: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(dtype)
        return pointwise(input.to(dtype), weight, bias, "none", [], "").to(input.dtype)

    return ProviderWeight(multiply, values.nbytes)


def _blas(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """What `nn.Linear` does: MKL or whatever BLAS torch has, on the plain weight."""

    def multiply(input: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input.float(), values, None if bias is None else bias.float()).to(input.dtype)

    return ProviderWeight(multiply, values.nbytes)


def _onednn_int8(packed: PackedWeight, values: Tensor) -> ProviderWeight:
    """oneDNN's u8 x s8 product with the input rotated and quantized per row by torch ops, as `ops.linear` says.

    With q = round(x / step) + zero the sum is step * w_step * (q @ w^T - zero * sum(w)): oneDNN gives w_step * (q @ w^T), and the
    zero point and the bias come in by a product of rank 2.
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
    # Elsewhere oneDNN's int8 product alone takes as long as our kernel with all that is around it.
    return {"amx_tile", "amx_int8"} <= hardware.detect().flags


PROVIDERS = (
    Provider("BLAS", "float32", _blas),  # keeps the values, so that they are there for the next
    Provider("oneDNN", "float32", _onednn),
    Provider("oneDNN", "bfloat16", _onednn),
    Provider("oneDNN", "int8", _onednn_int8, wanted=_has_amx),
)
