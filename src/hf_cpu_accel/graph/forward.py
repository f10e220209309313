"""`FastForward`: the replacement of a layer's `forward`, and the common part of all forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.graph.accepted_arguments import fits_size, takes
from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.matrices import with_plain_edges
from hf_cpu_accel.graph.propagate import FastPropagate, adjacency_of
from hf_cpu_accel.ops.sparse import KERNEL_DTYPES


class FastForward:
    """Replaces `conv.forward`, which stays on the class.

    Under autocast the layer's own forward runs, which casts between its ops, with the replaced `propagate`.

    Attributes:
        compute: a function of the layer, its FastPropagate and the arguments of its forward; it returns NotImplemented for calls
            that it does not support.
    """

    def __init__(self, conv: MessagePassing, propagate: FastPropagate, compute: Callable[..., Any]) -> None:
        self.conv, self.propagate, self.compute = conv, propagate, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            return type(self.conv).forward(self.conv, *args, **kwargs)
        plain, named = with_plain_edges(self.conv, args, kwargs)
        output = self.compute(self.conv, self.propagate, *plain, **named)
        if output is NotImplemented:
            return type(self.conv).forward(self.conv, *args, **kwargs)
        self.propagate.count()
        return output


def graph_of(
    conv: MessagePassing, propagate: FastPropagate, edge_index: Any, x: Any, size: Any, loops: bool = False
) -> tuple[Adjacency, Tensor, Tensor | None] | None:
    """Return the adjacency, and x of the sources and of the targets; None if the kernels do not support the call."""
    source, target = (x, x) if isinstance(x, Tensor) else x
    if not takes(conv, edge_index) or not isinstance(source, Tensor) or source.dim() != 2:
        return None
    if (
        source.layout is not torch.strided
        or source.dtype not in KERNEL_DTYPES
        or (target is not None and target.dim() != 2)
    ):
        return None
    if conv.flow == "target_to_source" and not isinstance(x, Tensor):
        return None
    targets = len(source) if target is None else len(target)
    if not fits_size(conv, edge_index, targets, len(source)):
        return None
    is_redundant = size is None or (target is not None and tuple(size) == (len(source), targets))
    if not is_redundant or (not isinstance(x, Tensor) and target is None):
        return None
    added = min(targets, len(source)) if loops else -1
    adjacency = adjacency_of(conv, edge_index, targets, len(source), added)
    return None if adjacency is None else (adjacency, source, target)
