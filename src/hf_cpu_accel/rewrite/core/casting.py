"""A cast or move that packed layers refuse is refused before any other layer has followed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_cpu_accel.patching.journal import add_attribute
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, changed_dtype


class AllOrNothing(Override):
    """`_apply` of an accelerated model, which `model.to(...)` calls.

    Raises:
        RuntimeError: as `changed_dtype`, with the model untouched.
    """

    name = "_apply"

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        packed = (module for module in self.model.modules() if isinstance(module, PackedModule))
        for dtype in {module.weight_dtype for module in packed}:
            changed_dtype(dtype, fn)
        return self.__wrapped__(fn, *args, **kwargs)


def cast_all_or_nothing(context: Context) -> None:
    """Have casts of the root checked first."""
    add_attribute(context.journal, context.root, AllOrNothing.name, AllOrNothing(context.root))
