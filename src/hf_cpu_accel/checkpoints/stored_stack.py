"""Parameters of experts over the quantized tensors of a checkpoint."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_cpu_accel.checkpoints.layout import IntegerLayout, Layout
from hf_cpu_accel.packing.affine import AffineGroups

Parts = tuple[tuple[str, Layout], ...]
"""Linears with concatenated output features: (name, layout) pairs."""


class StoredStack(Tensor):
    """A parameter with a quantized matrix for each expert. Ops get dequantized values; selecting an expert dequantizes only that
    one.

    Attributes:
        form: the name of the format, for reports.
        refusal: why it cannot be packed as affine groups, or None.
    """

    form: str
    refusal: str | None = None
    _names: tuple[str, ...]

    @abstractmethod
    def groups_of(self, expert: int) -> AffineGroups:
        """Return the stored values [out_features, in_features] of one expert."""

    @abstractmethod
    def matrix_of(self, expert: int) -> Tensor:
        """Return the dequantized matrix of one expert, in the shape of the parameter."""

    def numbers(self) -> Tensor:
        """Return all dequantized values, in the shape and dtype of the parameter."""
        values = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(len(self)):
            values[expert] = self.matrix_of(expert)
        return values

    @abstractmethod
    def over(self, held: Mapping[str, Tensor]) -> StoredStack:
        """Return a parameter of the same format over other tensors."""

    @property
    def held(self) -> dict[str, Tensor]:
        """The stored tensors, by the names of this class."""
        return {name: getattr(self, name) for name in self._names}

    def __tensor_flatten__(self) -> tuple[list[str], StoredStack]:
        return list(self._names), self

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], like: StoredStack, *sizes: Any) -> StoredStack:
        return like.over(tensors)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

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
            return stack.over({name: func(tensor) for name, tensor in stack.held.items()})
        if func is aten.select.int and args[1] == 0:
            stack, _, expert = args
            return stack.matrix_of(expert).to(stack.dtype)
        args, kwargs = tree_map_only(StoredStack, StoredStack.numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


class LinearsStack(StoredStack):
    """The parameter [experts, out_features, in_features] over linears that the file stores separately, one or more per expert.

    Args:
        experts: the linears of each expert.
        held: the tensors, by "expert.linear.name in the checkpoint".
        dtype: of the parameter.
        refusal: why it cannot be packed, or None.
    """

    experts: tuple[Parts, ...]

    @staticmethod
    def __new__(
        cls,
        experts: tuple[Parts, ...],
        held: Mapping[str, Tensor],
        dtype: torch.dtype,
        refusal: str | None = None,
    ) -> LinearsStack:
        layouts = [layout for _, layout in experts[0]]
        rows = sum(layout.out_features for layout in layouts)
        shape = (len(experts), rows, layouts[0].in_features)
        stack = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        assert isinstance(stack, LinearsStack)
        stack.experts, stack._names, stack.form = experts, tuple(held), layouts[0].form
        for name, tensor in held.items():
            setattr(stack, name, tensor)
        stack.refusal = refusal
        return stack

    def over(self, held: Mapping[str, Tensor]) -> LinearsStack:
        return LinearsStack(self.experts, held, self.dtype, self.refusal)

    def groups_of(self, expert: int) -> AffineGroups:
        bits, group = self._bits_and_group
        parts = [
            layout.rows(tensors, 0, layout.out_features).regroup(bits, group)
            for layout, tensors in self._linears(expert)
            if isinstance(layout, IntegerLayout)
        ]
        q, scale, offset = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("q", "scale", "offset")
        )
        return AffineGroups(q, scale, offset, bits, group)

    @cached_property
    def _bits_and_group(self) -> tuple[int, int]:
        """The bits and the group to pack all of them in as one weight."""
        layouts = [
            layout for parts in self.experts for _, layout in parts if isinstance(layout, IntegerLayout)
        ]
        bits = max(layout.packed_bits for layout in layouts)
        return bits, math.gcd(*(layout.packed_group or 0 for layout in layouts))

    def matrix_of(self, expert: int) -> Tensor:
        return torch.cat([layout.dequantize(tensors) for layout, tensors in self._linears(expert)])

    def _linears(self, expert: int) -> list[tuple[Layout, dict[str, Tensor]]]:
        return [
            (layout, {part: getattr(self, f"{expert}.{name}.{part}") for part in layout.held})
            for name, layout in self.experts[expert]
        ]

    def check(self) -> None:
        """Set `refusal` after the values are loaded."""
        self.refusal = self._find_refusal()

    def _find_refusal(self) -> str | None:
        for expert in range(len(self.experts)):
            for layout, tensors in self._linears(expert):
                if not isinstance(layout, IntegerLayout) or layout.packed_group is None:
                    return f"{layout.form}: cannot be packed as affine groups"
                try:
                    order = layout.order(tensors)
                except ValueError as error:
                    return f"{layout.form}: {error}"
                if order is not None:
                    return f"{layout.form}: experts whose input features are reordered are not supported"
        return None
