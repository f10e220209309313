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
    """A tensor with a known shape and dtype whose values `_make` computes at the first op that reads or writes them.

    Code between two replaced layers, and hooks of the user, can use it like any tensor. The values are computed once, even if
    several threads read them at the same time. If `_make` raises, the next read calls it again.
    """

    _tensor: Tensor | None
    _lock: AbstractContextManager[
        Any
    ]  # for computing the values, and for registering with the layer that computes them
    _is_exposed: bool  # there may be a view of the values

    # torch functions go through dispatch, without wrapping of results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def like(cls, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Any:
        """Create an instance without values, on the CPU; contiguous if `strides` is None."""
        lazy = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=_CPU)
        lazy._tensor, lazy._is_exposed, lazy._lock = None, False, RLock()
        return lazy

    @property
    def tensor(self) -> Tensor:
        """The ordinary tensor, computed if needed."""
        if self._tensor is None:
            with self._lock:
                if self._tensor is None:
                    self._tensor = self._make()
                    self._forget()
        return self._tensor

    @property
    def is_written(self) -> bool:
        """Return whether the values were written to, so that the attributes no longer describe them.

        Only for subclasses whose `_make` can be called again. Views created below autograd do not share the version of their base,
        so values that may have a view are compared with newly computed ones.
        """
        return self._is_exposed and not torch.equal(self.tensor, self._make())

    def _exposed(self) -> Tensor:
        """Return the ordinary tensor for code that may write to it."""
        self._is_exposed = True
        return self.tensor

    @abstractmethod
    def _make(self) -> Tensor:
        """Compute the values, under the lock. It may read the values of tensors that are older than this one."""

    def _forget(self) -> None:
        """Release the inputs of `_make` after the values are computed."""

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
    """Return the arguments of an op with ordinary tensors instead of lazy ones, computing them if needed."""
    unwrap = _EXPOSED if func.is_view or func._schema.is_mutable else _ORDINARY
    if kwargs or any(isinstance(arg, list | tuple) for arg in args):
        unwrapped: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(LazyTensor, unwrap, (args, kwargs))
        return unwrapped
    # Most calls, at a fifth of the cost.
    return tuple(unwrap(arg) if isinstance(arg, LazyTensor) else arg for arg in args), kwargs


def ordinary(value: Any) -> Any:
    """Return `value`, or the ordinary tensor of a lazy one, computed if needed."""
    return value.tensor if isinstance(value, LazyTensor) else value


def all_made(value: Any) -> Any:
    """Return `value` with ordinary tensors instead of the lazy ones in it, computed if needed."""
    return tree_map_only(LazyTensor, _ORDINARY, value)


class VersionGuard:
    """A tensor that a lazy tensor reads later, and that must not be written to before.

    Args:
        layer: the kind of layer, for the error.
    """

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self._tensor = tensor
        self._layer = layer
        self._version = (
            None if tensor.is_inference() else tensor._version
        )  # inference tensors count no writes

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: the tensor was written to.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"the input of a {self._layer}, or the tensor added to its output, was written to before its output was read; "
                f"call hf_cpu_accel.restore(model), or name that {self._layer} in skip_modules"
            )
        return self._tensor


_CPU = torch.device("cpu")


def settled(value: Any) -> Any:
    """Return `value`, or the ordinary tensor of a lazy one that was written to."""
    return value.tensor if isinstance(value, LazyTensor) and value.is_written else value


_ORDINARY, _EXPOSED = attrgetter("tensor"), methodcaller("_exposed")
