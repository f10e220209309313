"""Check a cast or move of the whole model before any layer follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.patching.float16 import Float16Model
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, around_packed, changed_dtype


class AllOrNothing(Override):
    """`_apply` of an accelerated model, which `model.to(...)` calls.

    Raises:
        RuntimeError: as `changed_dtype`, with the model untouched.
    """

    name = "_apply"

    def __init__(self, model: nn.Module, float16: Float16Model | None) -> None:
        super().__init__(model)
        self.float16 = float16

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        known = self.float16
        if known is None:
            self._check(fn)
            return self.__wrapped__(fn, *args, **kwargs)
        outside, computed = (fn(torch.empty(0, dtype=dtype)) for dtype in (known.dtype, torch.float32))
        narrows = outside.dtype is computed.dtype is torch.float16 and outside.device.type == "cpu"
        if narrows and known.is_all and known.dtype in (torch.float16, torch.float32):
            known.dtype = torch.float16  # it computes in float32 for either dtype
            return self.model
        self._check(fn)
        made = self.__wrapped__(fn, *args, **kwargs)
        known.dtype = outside.dtype
        return made

    def _check(self, fn: Callable[[Tensor], Tensor]) -> None:
        packed = (module for module in self.model.modules() if isinstance(module, PackedModule))
        for dtype in {module.weight_dtype for module in packed}:
            changed_dtype(dtype, fn)


def cast_all_or_nothing(context: Context) -> None:
    """Check casts of the root, and of modules that contain packed modules, before they run."""
    for module in around_packed(context.root):
        if AllOrNothing.name in vars(module):
            continue
        float16 = context.float16.model if context.float16 and module is context.root else None
        add_attribute(context.journal, module, AllOrNothing.name, AllOrNothing(module, float16))
