"""A weight that is unpacked only if somebody computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyWeight(Tensor):
    """What `linear.weight` gives where the weight is packed; read-only.

    Some models read `linear.weight.dtype` in every forward (T5), so shape, dtype and device must cost nothing. A few
    compute with the values (MobileBERT's head, Mamba): these are dequantised once and kept in `memo`, so that such a
    model pays memory for that layer instead of time in every forward.

    Args:
        unpack: makes the dequantised values, of `shape` and `dtype`.
    """

    unpack: Callable[[], Tensor]
    memo: dict[torch.dtype, Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        unpack: Callable[[], Tensor],
        memo: dict[torch.dtype, Tensor],
    ) -> LazyWeight:
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        weight.unpack = unpack
        weight.memo = memo
        return weight

    def kept(self) -> Tensor:
        """The values, made once."""
        if self.dtype not in self.memo:
            self.memo[self.dtype] = self.unpack()
        return self.memo[self.dtype]

    @property
    def data(self) -> Tensor:
        return self.unpack()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise read_only()

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"LazyWeight({self.unpack()!r})"

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
        args, kwargs = tree_map_only(LazyWeight, LazyWeight.kept, (args, kwargs or {}))
        return func(*args, **kwargs)


def read_only() -> RuntimeError:
    return RuntimeError(
        "the weight of an accelerated layer is packed and read-only: call hf_cpu_accel.restore first"
    )
