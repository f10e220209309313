"""A weight that is unpacked only if it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyWeight(Tensor):
    """The value of `linear.weight` for a packed weight. It and its views are read-only.

    Some models read `linear.weight.dtype` in every forward (T5), so shape, dtype and device cost nothing. A few compute with the
    values (MobileBERT's head, Mamba). These are dequantized once and cached in `memo`, which costs memory instead of time in every
    forward.

    Args:
        shape, dtype: of the weight.
        unpack: computes the dequantized values, in `shape` and `dtype`.
        memo: {dtype: cached values}.
        strides: None for contiguous.
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
        strides: Sequence[int] | None = None,
    ) -> LazyWeight:
        device = torch.device("cpu")
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        weight.unpack = unpack
        weight.memo = memo
        return weight

    def kept(self) -> Tensor:
        """Return the values, computed once."""
        if self.dtype not in self.memo:
            self.memo[self.dtype] = self.unpack()
        return self.memo[self.dtype]

    @property
    def data(self) -> Tensor:
        return _read_only(self, self.unpack, self.memo)

    @data.setter
    def data(self, value: Tensor) -> None:
        raise read_only()

    # These do not go through dispatch.
    def numpy(self, *, force: bool = False) -> Any:
        values = self.kept().numpy(force=force).view()
        values.flags.writeable = False
        return values

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def tolist(self) -> Any:
        return self.kept().tolist()

    def data_ptr(self) -> int:
        return self.kept().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.unpack().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.unpack()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpack().__reduce_ex__(protocol)

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
        if func._schema.is_mutable and _writes_to_one(func._schema, args, kwargs or {}):
            raise read_only()
        if func is torch.ops.aten.detach.default:
            return _read_only(args[0], args[0].unpack, args[0].memo)
        args, kwargs = tree_map_only(LazyWeight, LazyWeight.kept, (args, kwargs or {}))
        output = func(*args, **kwargs)
        return tree_map_only(Tensor, _view, output) if func.is_view else output


def _writes_to_one(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(
                isinstance(value, LazyWeight) for value in (target if isinstance(target, list) else [target])
            ):
                return True
    return False


def _read_only(like: Tensor, unpack: Callable[[], Tensor], memo: dict[torch.dtype, Tensor]) -> LazyWeight:
    return LazyWeight(like.shape, like.dtype, unpack, memo, like.stride())


def _view(values: Tensor) -> LazyWeight:
    """Return a read-only view of values."""
    return _read_only(values, lambda: values, {values.dtype: values})


def read_only() -> RuntimeError:
    """Return the error to raise for a write to a packed weight."""
    return RuntimeError(
        "the weight of an accelerated layer is packed and read-only; call hf_cpu_accel.restore(model), change the weight, and "
        "accelerate the model again"
    )
