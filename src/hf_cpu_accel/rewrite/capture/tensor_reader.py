"""The parameters and buffers of a recorded layer, and the addresses of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.capture.program import Mismatch

_PACKAGE = "hf_cpu_accel."


class ParameterReader:
    """Read a parameter or buffer by name, since casts and users may replace it.

    Args:
        module: the module that holds it.
    """

    __name__ = "held"

    def __init__(self, module: nn.Module, name: str) -> None:
        self.tensors: Any = module._parameters if name in module._parameters else module._buffers
        self.name = name
        tensor: Any = self.tensors[name]
        self._tensor, self._dtype = tensor, tensor.dtype

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self._tensor.shape
        return shape

    def __call__(self) -> Tensor:
        """Return the tensor.

        Raises:
            Mismatch: it is another kind of tensor than the steps expect.
            KeyError: it was removed.
        """
        tensor: Any = self.tensors[self.name]
        if tensor is not self._tensor:
            if tensor is None or tensor.shape != self._tensor.shape:
                raise Mismatch
            self._tensor = tensor
        if tensor.dtype is not self._dtype:  # a cast keeps the parameter
            raise Mismatch
        return tensor


def is_package_module(module: nn.Module) -> bool:
    return any(cls.__module__.startswith(_PACKAGE) for cls in type(module).__mro__)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the parameters and buffers of the module itself."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor; 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
