"""A weight that is unpacked only if somebody computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_cpu_accel.packing import PackedWeight, unpack_linear


class LazyWeight(Tensor):
    """What `linear.weight` gives where the weight is packed: [N, K], read-only.

    Some models read `linear.weight.dtype` in every forward (T5), so shape, dtype and device must cost nothing. Values
    are dequantised anew for each operation that needs them.
    """

    packed: PackedWeight

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype) -> LazyWeight:
        shape = (packed.out_features, packed.in_features)
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        weight.packed = packed
        return weight

    def unpack(self) -> Tensor:
        """The dequantised values as an ordinary tensor."""
        return unpack_linear(self.packed).to(self.dtype)

    @property
    def data(self) -> Tensor:
        return self.unpack()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise read_only()

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"LazyWeight({self.unpack()!r}, packed={self.packed.dtype!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable and any(isinstance(arg, LazyWeight) for arg in args):
            raise read_only()
        unpack: Callable[[LazyWeight], Tensor] = LazyWeight.unpack
        args, kwargs = tree_map_only(LazyWeight, unpack, (args, kwargs or {}))
        return func(*args, **kwargs)


def read_only() -> RuntimeError:
    return RuntimeError(
        "the weight of an accelerated layer is packed and read-only: call hf_cpu_accel.restore first"
    )
