"""Check whether the calling thread traces a graph; torch only has a flag for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_TRACER = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("Tracer"))  # type: ignore[arg-type]
_lock = threading.Lock()
_exporting: int | None = None  # the thread that is in `exporting`


def is_tracing() -> bool:
    """Return whether the calling thread traces a graph, by `torch.compile`, `torch.export` or `torch.jit.trace`.

    Sizes of a graph are symbols, so code that reads them as numbers, or that defers work to a later layer, must not run.

    `torch.compiler.is_compiling()` is for the whole process; the thread is known while this package exports. Code that depends on
    each other while a graph is traced uses this function, since the result must be consistent.
    """
    if torch.jit.is_tracing():  # of this thread
        return True
    return torch.compiler.is_compiling() and (_exporting is None or _exporting == threading.get_ident())


def untraced() -> AbstractContextManager[Any]:
    """Return a context in which `torch.jit.trace` records nothing: tensors computed inside are constants of the trace."""
    return torch._C._ExcludeDispatchKeyGuard(_TRACER)


def constant_while_traced(function: F) -> F:
    """Mark a function like `torch.compiler.assume_constant_result`: its result during tracing is a constant of the graph.

    Unlike that function, this does not import Dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def exporting() -> Iterator[None]:
    """Inside, this thread exports a graph, while other threads may call the model. Only one thread exports at a time."""
    global _exporting
    with _lock:
        _exporting = threading.get_ident()
        try:
            yield
        finally:
            _exporting = None
