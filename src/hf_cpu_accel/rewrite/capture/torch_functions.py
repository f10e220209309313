"""Outputs of torch functions that a recorder treats specially, and the arguments that its steps may have."""

from __future__ import annotations

from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.capture.size import Size

# Functions whose output depends only on the form of the call, or is equal for all tensors of a layer.
FORM = frozenset(
    {"dim", "ndim", "is_floating_point", "is_complex", "element_size", "itemsize", "requires_grad"}
    | {"is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"}
)
# Allowed arguments of a step besides tensors and modules, and lists, tuples, dictionaries and slices of these.
CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, type, FunctionType, BuiltinFunctionType),
)
# Functions that return a view or a copy of their argument, depending on its strides.
MAY_COPY = frozenset(
    {Tensor.contiguous, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel}
    | {torch.reshape, torch.flatten, torch.ravel}
)
# Functions that remove dimensions of size one.
SQUEEZES = ("squeeze", "squeeze_")


def holds_constants_only(value: Any) -> bool:
    """Return whether the value contains neither tensors nor sizes."""
    if isinstance(value, tuple | list):
        return all(map(holds_constants_only, value))
    if isinstance(value, dict):
        return all(map(holds_constants_only, value.values()))
    return isinstance(value, type(None) | bool | int | float | str) and not isinstance(value, Size)
