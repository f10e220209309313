"""The tracer: report the calls that foreign code makes to torch, to listeners by function or op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.rewrite.core.foreign_code import ours
from hf_cpu_accel.runtime.torch_modes import AroundFunctions, AroundOps

# Called after a call with its arguments, keyword arguments and output.
Listener = Callable[[tuple[Any, ...], dict[str, Any], Any], None]

# Functions with which layers write attention themselves.
MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
BMM = (torch.bmm, Tensor.bmm)
BADDBMM = (torch.baddbmm, Tensor.baddbmm)
SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


@contextmanager
def traced(
    *,
    ops: Mapping[Any, Listener] | None = None,
    functions: Mapping[Any, Listener] | None = None,
    replacements: Mapping[Any, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Call listeners for the calls that this thread makes inside the context, in their order.

    Args:
        ops: {op below autograd, such as `torch.ops.aten.embedding.default`: listener}.
        functions: {function of torch as Python calls it, such as `torch.softmax`: listener}. Functions that it calls in turn are
            not reported.
        replacements: {op: function that is called in its place, with its arguments}.

    Raises:
        OwnError: an error of a listener or a replacement, for `attempt`.
    """
    with (
        AroundFunctions(partial(_tell, functions or {}, {})),
        AroundOps(partial(_tell, ops or {}, replacements or {})),
    ):
        yield


def _tell(
    listeners: Mapping[Any, Listener],
    replacements: Mapping[Any, Callable[..., Any]],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    replacement = replacements.get(func)
    if replacement is not None:
        with ours():
            return replacement(*args, **kwargs)
    output = func(*args, **kwargs)
    listener = listeners.get(func)
    if listener is not None:
        with ours():
            listener(args, kwargs, output)
    return output
