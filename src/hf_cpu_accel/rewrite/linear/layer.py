"""`PackedLinear`, the replacement of an `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hf_cpu_accel.packing.linear import PackedWeight, unpack_linear
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.accelerated_module import SavedParameter
from hf_cpu_accel.patching.float16_values import to_float16
from hf_cpu_accel.patching.hooks import forward_hooks
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup

# Reason why a layer is not fused: its ops do not support this.
PERMUTED = "one of its linears reorders its input features (act-order quantization): its parts run separately"


class PackedLinear(PackedModule):
    """`y = x W^T + b` with packed `W`: [..., in_features] -> [..., out_features], float32 or bfloat16 as `x` is (float16, too,
    where one layer of a model with float16 weights is called by itself).

    Its weight is the member `index` of `group`.

    Attributes:
        group, index: the packed weight, and the part of it; `range` are its output features.
        transposed: whether the original stores its weight as [in_features, out_features].
    """

    is_of_linears: bool = True

    def __init__(
        self, group: ProjectionGroup, index: int, linear: nn.Linear, *, transposed: bool = False
    ) -> None:
        super().__init__(linear)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.group = group
        self.index = index
        self.transposed = transposed
        group.hooks.extend(forward_hooks(self))

    def forward(self, input: Tensor) -> Tensor:
        check_inference(self, input)
        if input.dtype is torch.float16:
            return to_float16(self.group.forward(self.index, input.float()))
        return self.group.forward(self.index, input)

    @property
    def packed(self) -> PackedWeight:
        return self.group.weight(self.index, self.index)[0]

    @property
    def used_bias(self) -> Tensor | None:
        """Return the bias that is added to the product."""
        return self.bias

    def saved_parameters(self) -> Iterator[SavedParameter]:
        if not self.is_computed:
            yield SavedParameter("weight", self._saved_weight, self.group, self.index)

    def _saved_weight(self, paths: tuple[str, ...]) -> SavedWeight:
        return SavedWeight(self.rule, paths, self.group.in_own_order(), self._lost, self.permutation)

    @property
    def copies_bias(self) -> bool:
        return len(self.group.ranges) > 1 or self.used_bias is not self.bias

    @property
    def permutation(self) -> Tensor | None:
        """Return the input features in the order of the packed weight, or None for their own order."""
        return self.group.permutation

    @property
    def range(self) -> tuple[int, int]:
        return self.group.ranges[self.index]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    @property
    def packed_dtype(self) -> str:
        return self.group.packed.dtype

    def unpack(self) -> Tensor:
        """Return the dequantized weight, in the shape and dtype of the original."""
        values = unpack_weight(self.packed, self.permutation, self.weight_dtype)
        places = self.group.places(self.index)
        values = values if places is None else values[places]
        return values.T.contiguous() if self.transposed else values

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"packed={self.group.packed.dtype}, range={self.range} of {self.group.packed.out_features}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        super()._apply(fn, recurse)
        self.group.take_bias(self.index, self.used_bias)
        return self


def unpack_weight(packed: PackedWeight, permutation: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [out_features, in_features] in `dtype`, with the input features in their own order; see
    `ProjectionGroup.permutation`."""
    values = unpack_linear(packed).to(dtype)
    return values if permutation is None else torch.empty_like(values).index_copy_(1, permutation, values)


def is_permuted(module: nn.Module) -> bool:
    """Return whether a packed linear in `module` reorders its input features."""
    return any(
        isinstance(child, PackedLinear) and child.permutation is not None for child in module.modules()
    )
