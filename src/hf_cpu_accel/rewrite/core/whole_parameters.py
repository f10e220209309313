"""List packed weights in `parameters()` of accelerated models, as values that are unpacked when read.

A loop that writes to all parameters raises at the first packed one, instead of writing to the rest alone. Counts of parameters
equal those of the original, and `get_memory_footprint()` returns the size of the packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_weight import LazyWeight
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_module import around_packed

_FOOTPRINT, _WHOLE = "get_memory_footprint", "whole_parameters"


class NamedParameters(Override):
    """`named_parameters` of a packed module, or of one that contains packed modules; `parameters` calls it.

    `remove_duplicate=False` gives the registered parameters alone. torch exporters pass it to find the places that they put other
    tensors into, and a packed weight has none.
    """

    name = "named_parameters"

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, parameter) as `nn.Module.named_parameters`; packed weights are read-only `LazyWeight`s."""
        members = _registered if torch.compiler.is_compiling() or not remove_duplicate else _whole
        found: Iterator[tuple[str, Tensor]] = self.model._named_members(
            members, prefix=prefix, recurse=recurse, remove_duplicate=remove_duplicate
        )
        return found

    @property
    def __func__(self) -> Callable[..., Any]:
        """Return the method of the class, as a bound method does, since Dynamo reads it."""
        method: Callable[..., Any] = getattr(type(self.model), self.name)
        return method


class MemoryFootprint(Override):
    """`get_memory_footprint` of a model.

    Args:
        packed_bytes: the sizes of the packed weights in it.
    """

    name = _FOOTPRINT

    def __init__(self, model: nn.Module, packed_bytes: int) -> None:
        super().__init__(model)
        self.packed_bytes = packed_bytes

    def __call__(self, return_buffers: bool = True) -> int:
        """Return the bytes of parameters, of packed weights, and of buffers unless `return_buffers` is False."""
        tensors = [tensor for tensor in self.model.parameters() if not isinstance(tensor, LazyWeight)]
        tensors += self.model.buffers() if return_buffers else ()
        return self.packed_bytes + sum(tensor.nbytes for tensor in tensors)


def show_packed_weights(context: Context) -> None:
    """Make packed modules, and modules that contain them, list packed weights as parameters and count their bytes."""
    paths = {id(module): path for path, module in context.root.named_modules()}
    packed = [module for module in context.root.modules() if hasattr(type(module), _WHOLE)]
    around = around_packed(context.root) if packed else []
    for module in {id(module): module for module in (*around, *packed)}.values():
        overrides: list[Override] = [NamedParameters(module)]
        if hasattr(type(module), _FOOTPRINT):
            overrides.append(MemoryFootprint(module, _packed_bytes(context, paths[id(module)])))
        for override in overrides:
            add_attribute(context.journal, module, override.name, override)


def _packed_bytes(context: Context, path: str) -> int:
    """Return the size in bytes of the packed weights below a path."""
    return sum(
        item.packed_bytes
        for item in context.results.items
        if not path or f"{item.name}.".startswith(f"{path}.")
    )


def _whole(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Return (name, parameter) pairs of the module itself, as the original has them."""
    whole = getattr(type(module), _WHOLE, None)
    return (module._parameters if whole is None else whole(module)).items()


def _registered(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return module._parameters.items()
