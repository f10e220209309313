"""The parameters and buffers of a recorded layer, and where tensors lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.recorded.program import Mismatch

_PACKAGE = "hf_cpu_accel."


class ParameterReader:
    """Reads a parameter or buffer by its name: casts and users exchange them.

    Args:
        module: what holds it.
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
        """
        Raises:
            Mismatch: it is another kind of tensor than the steps are for.
            KeyError: it is there no more.
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
    """(name, tensor) of those that it holds itself."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All of them, in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def address(tensor: Tensor) -> int:
    """Of its memory; 0 if it has none of its own."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
