"""4-bit weights in the layout of torch's CPU kernel (`_weight_int4pack_mm_for_cpu`), which quanto and torchao use.

weight = (q - 8) * scale + middle,    one pair (scale, middle) for each group: [groups, out_features, 2]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_cpu_accel.packing.affine import AffineGroups

_GROUP = 32  # any that the kernel takes
_FEATURES_AT_ONCE = 256


def integers(packed: Tensor, in_features: int) -> Tensor:
    """Return the integers, uint8 [out_features, in_features]. The layout depends on the CPU, so the kernel itself unpacks them.

    Args:
        packed: from `torch._convert_weight_to_int4pack_for_cpu`.
    """
    out_features = packed.shape[0]
    scale_and_middle = torch.ones(in_features // _GROUP, out_features, 2, dtype=torch.bfloat16)
    scale_and_middle[..., 1] = 8
    q = torch.empty(out_features, in_features, dtype=torch.uint8)
    for first in range(0, in_features, _FEATURES_AT_ONCE):
        last = min(first + _FEATURES_AT_ONCE, in_features)
        ones = torch.zeros(last - first, in_features, dtype=torch.bfloat16)
        ones[torch.arange(last - first), torch.arange(first, last)] = 1
        values = torch.ops.aten._weight_int4pack_mm_for_cpu(ones, packed, _GROUP, scale_and_middle)
        q[:, first:last] = values.T.to(torch.uint8)
    return q


def affine_rows(q: Tensor, scale_and_middle: Tensor, group: int, first: int, last: int) -> AffineGroups:
    """Return the output features [first, last) of a weight with the integers `q`."""
    scale, middle = (part.T.float() for part in scale_and_middle[:, first:last].unbind(-1))
    return AffineGroups(q[first:last], scale, middle - 8 * scale, 4, group)
