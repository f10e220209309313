"""The choice between the two 4-bit forms of a weight: `int4` (int4.py) or affine groups (affine.py).

For trained weights the errors are alike, and int4 is smaller (4.25 bits against 5 in groups of 32) and multiplies in 8 bits. A
weight that was quantized before is on a grid, which affine groups represent exactly, and the rotation of int4 does not.
"""

from __future__ import annotations

from torch import Tensor

from hf_cpu_accel.packing.linear import pack_linear, unpack_linear

_SAMPLED_ROWS = 64
# Affine groups are larger and slower, so they are used only if they halve the error.
_WORTH_IT = 0.5


def nearest_form(weight: Tensor, dtype: str, group: int) -> str:
    """Return the form to pack `weight` [N, K] in: `dtype`, or "affine4" for "int4" if its error on a few rows is much smaller."""
    if dtype != "int4" or weight.numel() == 0:
        return dtype
    step = max(1, weight.shape[0] // _SAMPLED_ROWS)
    rows = weight.detach()[::step][:_SAMPLED_ROWS].float()

    def error(form: str) -> float:
        return (unpack_linear(pack_linear(rows, form, int4_group=group)) - rows).norm().item()

    return "affine4" if error("affine4") <= _WORTH_IT * error("int4") else dtype
