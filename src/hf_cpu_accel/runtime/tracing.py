"""Which thread traces a graph: torch says for the whole process whether one is traced."""

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

    Sizes of a graph are symbols: what reads them as numbers, or waits for a later layer, must not run.

    `torch.compiler.is_compiling()` is of the whole process; the thread is known while this package exports. Parts that leave work
    to one another where a graph is traced ask this, since the answer must not change between them.
    """
    if torch.jit.is_tracing():  # of this thread
        return True
    return torch.compiler.is_compiling() and (_exporting is None or _exporting == threading.get_ident())


def untraced() -> AbstractContextManager[Any]:
    """Return a context in which `torch.jit.trace` records nothing: tensors that are computed become constants of the trace."""
    return torch._C._ExcludeDispatchKeyGuard(_TRACER)


def constant_while_traced(function: F) -> F:
    """What `torch.compiler.assume_constant_result` makes of a function: a graph has what it gives when it is traced.

    That imports Dynamo, which takes seconds; to see the mark takes none.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def exporting() -> Iterator[None]:
    """Inside, this thread exports a graph, while others may call the model; one thread after the other."""
    global _exporting
    with _lock:
        _exporting = threading.get_ident()
        try:
            yield
        finally:
            _exporting = None
