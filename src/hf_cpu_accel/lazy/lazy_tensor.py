"""A tensor that is computed only if it is used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(Tensor):
    """Shape and dtype are known and cost nothing; the first op that reads or writes the values has them made by `_make`.

    Code between two of our layers, or a user's hook, cannot tell it from a tensor that holds its values. They are made once, also
    where several threads ask for them at the same time; where making them fails, the next who asks has it tried again.
    """

    _tensor: Tensor | None
    _lock: AbstractContextManager[Any]  # held by who makes the values, or joins in what will make them
    _is_exposed: bool  # there may be a view of the values

    # What torch functions do with it they do through dispatch: no wrapping of results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Any:
        """An instance without values, on the CPU; contiguous if no strides are given."""
        lazy = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=_CPU)
        lazy._tensor, lazy._is_exposed, lazy._lock = None, False, RLock()
        return lazy

    @property
    def tensor(self) -> Tensor:
        """The ordinary tensor, made now if it is not there yet."""
        if self._tensor is None:
            with self._lock:
                if self._tensor is None:
                    self._tensor = self._make()
                    self._forget()
        return self._tensor

    @property
    def is_written(self) -> bool:
        """Whether the values were written to, so that they are no longer what the attributes say.

        Only for subclasses whose `_make` can be called again. Views that are made below autograd share no version with what they
        are views of, so values that there may be a view of are compared with new ones.
        """
        return self._is_exposed and not torch.equal(self.tensor, self._make())

    def _exposed(self) -> Tensor:
        """The ordinary tensor, which may be written to."""
        self._is_exposed = True
        return self.tensor

    @abstractmethod
    def _make(self) -> Tensor:
        """The values, for the one caller that holds the lock. It may ask for those of tensors that were there before this one."""

    def _forget(self) -> None:
        """Release what the values were made of, which are there now."""

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return repr(self.tensor)

    # These do not go through dispatch.
    def numpy(self, *, force: bool = False) -> Any:
        return self._exposed().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._exposed().__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._exposed().__dlpack__(**options)

    def tolist(self) -> Any:
        return self.tensor.tolist()

    def data_ptr(self) -> int:
        return self._exposed().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._exposed().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.tensor.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = ordinary_arguments(func, args, kwargs or {})
        return func(*args, **kwargs)


def ordinary_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with the ordinary tensors of lazy ones, which are made now."""
    made = _EXPOSED if func.is_view or func._schema.is_mutable else _ORDINARY
    if kwargs or any(isinstance(arg, list | tuple) for arg in args):
        with_made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(LazyTensor, made, (args, kwargs))
        return with_made
    # Most calls, at a fifth of the cost.
    return tuple(made(arg) if isinstance(arg, LazyTensor) else arg for arg in args), kwargs


def ordinary(value: Any) -> Any:
    """`value`; of a lazy tensor the ordinary one, which is made now."""
    return value.tensor if isinstance(value, LazyTensor) else value


def all_made(value: Any) -> Any:
    """`value` with the ordinary tensors of the lazy ones in it, which are made now."""
    return tree_map_only(LazyTensor, _ORDINARY, value)


class VersionGuard:
    """A tensor that a lazy one reads later, and that must be what it was until then.

    Args:
        layer: what kind of layer waits, for the error.
    """

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self._tensor = tensor
        self._layer = layer
        self._version = (
            None if tensor.is_inference() else tensor._version
        )  # inference tensors count no writes

    def tensor(self) -> Tensor:
        """
        Raises:
            RuntimeError: it was written to.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"the input of a {self._layer}, or the tensor added to its output, was written to before its output was read; "
                f"call hf_cpu_accel.restore(model), or name that {self._layer} in skip_modules"
            )
        return self._tensor


_CPU = torch.device("cpu")


def settled(value: Any) -> Any:
    """`value`; of a lazy tensor that was written to the ordinary one, whose values alone count."""
    return value.tensor if isinstance(value, LazyTensor) and value.is_written else value


_ORDINARY, _EXPOSED = attrgetter("tensor"), methodcaller("_exposed")
