"""Values in graphs: tensors, sizes and targets of calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.compiler.torch_private.versions import names

sym_sqrt: Any = getattr(torch, "_sym_sqrt", None)  # math.sqrt in graphs of symbolic numbers


def is_always(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on symbolic sizes is known to be true for all inputs; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def size_seen(size: int | torch.SymInt) -> int:
    """Return the size in the call that is compiled for, 0 if it depends on values; adds no guard."""
    from torch.fx.experimental import symbolic_shapes

    hint: Any = getattr(symbolic_shapes, names().size_hint)
    return int(hint(size, fallback=0))


def storage_of(value: Tensor) -> int:
    """Return a key that is equal for tensors, including fake ones, that share their memory."""
    return int(value.untyped_storage()._cdata)


def is_plain_tensor(value: Tensor) -> bool:
    """Return whether it is a CPU tensor, and not a wrapper subclass that unpacks itself while it is traced."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return (
        value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def is_higher_order(target: object) -> bool:
    """Return whether the target of a node takes graphs as arguments."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_transform(target: object) -> bool:
    """Return whether the target of a node enters or leaves a transform of torch.func: values inside have hidden dimensions."""
    return str(getattr(target, "__module__", "")).startswith("torch._functorch")
