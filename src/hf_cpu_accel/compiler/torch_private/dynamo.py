"""Dynamo's counters, and the sources of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def counters(name: str) -> Counter[str]:
    """Return Dynamo's counters of that name."""
    from torch._dynamo.utils import counters

    return counters[name]


def is_of_module(number: torch.SymFloat) -> bool:
    """Return whether this float is from a module, and not an argument of a call."""
    sources = number.node.shape_env.var_to_sources.get(number.node.expr, ())
    return any(source.guard_source.is_unspecialized_nn_module() for source in sources)


def is_static_input(placeholder: torch.fx.Node) -> bool:
    """Return whether this input of Dynamo's graph is from a module."""
    return bool((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


@contextmanager
def without_floats(scalars: Iterable[torch.SymFloat]) -> Iterator[None]:
    """Inside, compilation does not restart because these floats are no longer inputs of the graph.

    If a symbolic float does not become the value of a tensor, Inductor makes Dynamo trace the model again with that float as a
    constant. Floats that the passes dropped or guarded need no second trace.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    # Names that torch itself adds meanwhile must stay: the next trace reads them.
    added = {str(scalar.node._expr) for scalar in scalars} - TensorifyState.force_specializations
    TensorifyState.force_specializations.update(added)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(added)
