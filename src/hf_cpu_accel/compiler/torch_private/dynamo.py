"""What Dynamo found where, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def counters(name: str) -> Counter[str]:
    """Dynamo's counters of that name."""
    from torch._dynamo.utils import counters

    return counters[name]


def is_of_module(number: torch.SymFloat) -> bool:
    """Whether Dynamo found this float in a module, and not among the arguments of a call."""
    sources = number.node.shape_env.var_to_sources.get(number.node.expr, ())
    return any(source.guard_source.is_unspecialized_nn_module() for source in sources)


def is_static_input(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo found this input of its graph in a module."""
    return bool((placeholder.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


@contextmanager
def without_floats(scalars: Iterable[torch.SymFloat]) -> Iterator[None]:
    """Inside, compilation does not start over because these floats are no inputs of the graph any more.

    Where a symbolic float did not become a tensor's value, Inductor has Dynamo trace the model once more with that float as a
    constant. Those that our graph dropped, or guarded, need no second trace.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    # Names that torch itself adds meanwhile must outlive this: the next trace reads them.
    ours = {str(scalar.node._expr) for scalar in scalars} - TensorifyState.force_specializations
    TensorifyState.force_specializations.update(ours)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(ours)
