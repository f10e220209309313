"""The experts of gpt-oss in the format of their checkpoint: MXFP4, 32 numbers of 4 bits with a power of two.

    number = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2^(scale - 127)

Twice such a number is an integer from -12 to 12, so 8-bit affine groups are exact (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.stored_stack import StoredStack
from hf_cpu_accel.packing.affine import AffineGroups

GROUP = 32
_MOST = 12
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_BIAS = 127


class Mxfp4Stack(StoredStack):
    """The parameter [experts, in_features, out_features] of a projection.

    Attributes:
        blocks: uint8 [experts, out_features, groups, 16], with the even input features in the low 4 bits.
        scales: uint8 [experts, out_features, groups].
    """

    form = "MXFP4"
    blocks: Tensor
    scales: Tensor
    _names = ("blocks", "scales")

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Mxfp4Stack:
        experts, out_features, groups = scales.shape
        shape = (experts, groups * GROUP, out_features)
        stack = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        assert isinstance(stack, Mxfp4Stack)
        stack.blocks, stack.scales = blocks, scales
        return stack

    def over(self, held: Mapping[str, Tensor]) -> Mxfp4Stack:
        return Mxfp4Stack(held["blocks"], held["scales"], self.dtype)

    def groups_of(self, expert: int) -> AffineGroups:
        """Return [out_features, in_features] of one expert."""
        blocks, scales = self.blocks[expert].detach(), self.scales[expert].detach()
        doubled = torch.tensor([*_DOUBLED, *(-n for n in _DOUBLED)], dtype=torch.int8)
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        q = (doubled[codes.int()] + _MOST).view(torch.uint8)
        scale = torch.ldexp(torch.full(scales.shape, 0.5), scales.int() - _BIAS)
        return AffineGroups(q, scale, -_MOST * scale, 8, GROUP)

    def matrix_of(self, expert: int) -> Tensor:
        return self.groups_of(expert).dequantize().T
