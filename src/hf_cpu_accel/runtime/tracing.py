"""Check whether a graph is traced, and mark values as constants of a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_TRACER = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("Tracer"))  # type: ignore[arg-type]


def is_tracing() -> bool:
    """Return whether this thread traces a graph by `torch.jit.trace`, or any thread by `torch.compile` or `torch.export`.

    Sizes of a graph are symbols, so code that reads them as numbers, or that defers work to a later layer, must not run.
    """
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def untraced() -> AbstractContextManager[Any]:
    """Return a context in which `torch.jit.trace` records nothing: tensors computed inside are constants of the trace."""
    return torch._C._ExcludeDispatchKeyGuard(_TRACER)


def constant_while_traced(function: F) -> F:
    """Mark a function like `torch.compiler.assume_constant_result`: its result during tracing is a constant of the graph.

    Unlike that function, this does not import Dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
