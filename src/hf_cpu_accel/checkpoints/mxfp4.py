"""The experts of gpt-oss as their checkpoint stores them: MXFP4, 32 numbers of 4 bits with a power of two.

    number = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6} * 2^(scale - 127)

Twice such a number is an integer from -12 to 12, so affine groups of 8 bits hold them as they are (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_cpu_accel.packing.affine import AffineGroups

GROUP = 32
_MOST = 12
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_BIAS = 127


class Mxfp4Stack(Tensor):
    """The parameter [experts, in_features, out_features] of a projection, over what its file holds. What computes with it gets the
    numbers, of one expert where it takes one.

    Attributes:
        blocks: uint8 [experts, out_features, groups, 16], the even input features in the low halves.
        scales: uint8 [experts, out_features, groups].
    """

    blocks: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Mxfp4Stack:
        experts, out_features, groups = scales.shape
        shape = (experts, groups * GROUP, out_features)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=blocks.device)
        assert isinstance(made, Mxfp4Stack)
        made.blocks, made.scales = blocks, scales
        return made

    def groups_of(self, expert: int) -> AffineGroups:
        """[out_features, in_features] of one expert."""
        blocks, scales = self.blocks[expert].detach(), self.scales[expert].detach()
        doubled = torch.tensor([*_DOUBLED, *(-n for n in _DOUBLED)], dtype=torch.int8)
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        q = (doubled[codes.int()] + _MOST).view(torch.uint8)
        scale = torch.ldexp(torch.full(scales.shape, 0.5), scales.int() - _BIAS)
        return AffineGroups(q, scale, -_MOST * scale, 8, GROUP)

    def numbers(self) -> Tensor:
        """All of them, in the shape and dtype of the parameter."""
        values = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(len(self.scales)):
            values[expert] = self.groups_of(expert).dequantize().T
        return values

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["blocks", "scales"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> Mxfp4Stack:
        return cls(tensors["blocks"], tensors["scales"], dtype)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"Mxfp4Stack(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default):
            stack = args[0]
            return cls(func(stack.blocks), func(stack.scales), stack.dtype)
        if func is aten.select.int and args[1] == 0:
            stack, _, expert = args
            return stack.groups_of(expert).dequantize().T.to(stack.dtype)
        args, kwargs = tree_map_only(Mxfp4Stack, Mxfp4Stack.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)
