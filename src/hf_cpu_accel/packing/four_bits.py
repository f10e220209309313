"""Which of the two four-bit forms holds a weight better: `int4` (int4.py) or affine groups (affine.py).

On trained weights the two are alike, and int4 has fewer bytes (4.25 bits against 5 in groups of 32) and products of 8 bits. One
that was quantized before lies on a grid, which affine groups meet exactly, and the rotation of int4 does not.
"""

from __future__ import annotations

from torch import Tensor

from hf_cpu_accel.packing.linear import pack_linear, unpack_linear

_SAMPLED_ROWS = 64
# Affine groups have to pay for their bytes and their slower products: they are taken where they halve the error.
_WORTH_IT = 0.5


def nearest_form(weight: Tensor, dtype: str, group: int) -> str:
    """What `weight` [N, K] is packed as where `dtype` is asked for: "affine4" in place of "int4" where a few rows say that it is
    much nearer."""
    if dtype != "int4" or weight.numel() == 0:
        return dtype
    step = max(1, weight.shape[0] // _SAMPLED_ROWS)
    rows = weight.detach()[::step][:_SAMPLED_ROWS].float()

    def error(form: str) -> float:
        return (unpack_linear(pack_linear(rows, form, int4_group=group)) - rows).norm().item()

    return "affine4" if error("affine4") <= _WORTH_IT * error("int4") else dtype
