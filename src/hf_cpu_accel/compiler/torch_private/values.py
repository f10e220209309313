"""What graphs hold (tensors, sizes, targets of calls), and which modes are on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.compiler.torch_private.versions import names

sym_sqrt: Any = getattr(torch, "_sym_sqrt", None)  # what graphs of symbolic numbers call for math.sqrt


def is_always(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes is known to hold for all inputs; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def size_seen(size: int | torch.SymInt) -> int:
    """The size in the call that is compiled for, 0 where it depends on values; adds no guard."""
    from torch.fx.experimental import symbolic_shapes

    hint: Any = getattr(symbolic_shapes, names().size_hint)
    return int(hint(size, fallback=0))


def storage_of(value: Tensor) -> int:
    """Equal for tensors, fake ones too, that share their memory."""
    return int(value.untyped_storage()._cdata)


def is_plain_tensor(value: Tensor) -> bool:
    """No subclass that unpacks itself while it is traced, and not of another device."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def is_higher_order(target: object) -> bool:
    """Whether the target of a node takes graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_transform(target: object) -> bool:
    """Whether the target of a node begins or ends what torch.func does to a function: values between have hidden dimensions."""
    return str(getattr(target, "__module__", "")).startswith("torch._functorch")


def modes_are_on() -> bool:
    """Whether modes or hooks see or replace calls of torch or of all modules (tracers, counters, another default device)."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch.nn.modules.module._has_any_global_hook()
    )
