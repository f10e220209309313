"""`FastPropagate`: the replacement of a layer's `propagate`.

- Messages that are rows of the source nodes, weighted or not, are summed as they are read (spmm_reduce), without a tensor of
  messages.
- Other messages are computed by the layer's own `message`, and reduced by the kernels.
- Calls with hooks, explanations, sparse inputs or other devices run the layer's own `propagate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.graph.accepted_arguments import takes
from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.graph.matrices import propagate_matrix
from hf_cpu_accel.graph.message import Message
from hf_cpu_accel.graph.reduction import Reduction
from hf_cpu_accel.ops.derivatives import needs_gradient
from hf_cpu_accel.ops.sparse import Transposed, spmm_reduce

FEWEST_VALUES = 1 << 16
"""The layer itself computes messages of fewer numbers, because sorting their edges takes as long as it saves."""


def is_small(edge_index: Any, features: int) -> bool:
    """Return whether there are too few messages for a speedup. False in compiled code, which runs graphs of all sizes."""
    if torch.compiler.is_compiling() or not isinstance(edge_index, Tensor):
        return False
    return edge_index.shape[-1] * features < FEWEST_VALUES


def keeps_dtype(weight: Tensor, x: Tensor) -> bool:
    """Return whether x [N, ...] times `weight` has the dtype of x, like the outputs of the ops."""
    return torch.promote_types(weight.dtype, x.dtype) is x.dtype


def is_small_step(conv: MessagePassing, edge_index: Any, x: Tensor) -> bool:
    """Return whether autograd records a step with so few messages that recording the ops takes longer than they save."""
    return is_small(edge_index, x.shape[-1]) and needs_gradient(x, *conv.parameters())


def adjacency_of(
    conv: MessagePassing, edge_index: Tensor, targets: int, sources: int, loops: int = -1
) -> Adjacency | None:
    """Return the adjacency, or None if an index is out of range: then the layer itself raises its error."""
    try:
        return adjacencies.get(edge_index, conv.flow, targets, sources, loops)
    except RuntimeError:
        return None


def transposed_if(adjacency: Adjacency, *learned: Tensor | None) -> Transposed | None:
    """Return the transposed graph if autograd records one of these tensors, else None."""
    return adjacency.transposed() if needs_gradient(*learned) else None


def aggregate(
    adjacency: Adjacency, x: Tensor, reduce: str, value: Tensor | None = None, **epilogue: Any
) -> Tensor:
    """Compute `spmm_reduce` of x [N, ...] over the graph, with the transposed graph if autograd records x."""
    flat = x if x.dim() == 2 else x.flatten(1)
    output = spmm_reduce(
        adjacency.rowptr,
        adjacency.col,
        value,
        flat,
        reduce,
        transposed=transposed_if(adjacency, x),
        **epilogue,
    )
    return output if x.dim() == 2 else output.unflatten(1, x.shape[1:])


class FastPropagate:
    """Replaces `conv.propagate`, which stays on the class.

    Attributes:
        message: the layer's message, or None if only its own `message` can compute it.
        reduction: the reduction of the messages.
        compute: a function of the layer, the edges, their size and the arguments of `propagate`, which returns the output of
            `propagate`, or None for calls that it does not support. None for layers described by message and reduction.
        reduce: the name of the reduction if `spmm_reduce` has it, else None.
        served: the number of calls that ran the kernels, without calls from compiled code.
    """

    def __init__(
        self,
        conv: MessagePassing,
        message: Message | None,
        reduction: Reduction,
        compute: Callable[..., Tensor | None] | None = None,
    ) -> None:
        self.conv, self.message, self.reduction, self.compute = conv, message, reduction, compute
        self.reduce = reduction.plain
        self.served = 0

    def __call__(self, edge_index: Any, *args: Any, size: Any = None, **kwargs: Any) -> Any:
        conv = self.conv
        if args or not takes(conv, edge_index):
            output = None if args else propagate_matrix(self, edge_index, kwargs)
            if output is not None:
                self.count()
                return output
            return self._stock(edge_index, *args, size=size, **kwargs)
        output = None
        if self.compute is not None and not torch.is_autocast_enabled("cpu"):
            output = self.compute(conv, edge_index, size, **kwargs)
            if output is not None:
                self.count()
                return output
        if self.message is not None:
            output = self._sum_rows(self.message, edge_index, size, kwargs)
        if output is None:
            output = self._reduce_messages(edge_index, size, kwargs)
        return self._stock(edge_index, size=size, **kwargs) if output is None else output

    def count(self) -> None:
        """Count a call that ran the kernels. Not in compiled code, which would be recompiled for each count."""
        if not torch.compiler.is_compiling():
            self.served += 1

    def _stock(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self.conv).propagate(self.conv, edge_index, *args, **kwargs)

    def _sizes(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> tuple[int, int] | None:
        """Return (targets, sources) as the layer's `collect` infers them; None where it would have to read the edges."""
        conv = self.conv
        sizes = conv._check_input(edge_index, size)
        for name in conv._user_args:
            if name[-2:] in ("_i", "_j"):
                data = kwargs.get(name[:-2])
                if isinstance(data, tuple | list):
                    for side, part in enumerate(data):
                        if isinstance(part, Tensor):
                            conv._set_size(sizes, side, part)
                elif isinstance(data, Tensor):
                    conv._set_size(sizes, self._side(name), data)
        target, source = (1, 0) if conv.flow == "source_to_target" else (0, 1)
        targets = sizes[target] if sizes[target] is not None else sizes[source]
        sources = sizes[source] if sizes[source] is not None else sizes[target]
        return None if targets is None or sources is None else (targets, sources)

    def _side(self, name: str) -> int:
        return int((name[-2:] == "_i") == (self.conv.flow == "source_to_target"))

    def _sum_rows(
        self, message: Message, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor | None:
        x = kwargs.get(message.features)
        if isinstance(x, tuple | list):
            # `collect` gathers x_j from the first of a pair and x_i from the second, whatever the flow.
            x = x[0]
        weight = None if message.weight is None else kwargs.get(message.weight)
        if not isinstance(x, Tensor) or x.dim() != (3 if message.heads else 2):
            return None
        if is_small(edge_index, x.shape[1:].numel()):
            return None
        if self.conv.node_dim not in (0, -x.dim()):
            return None
        if weight is None and not message.copies:
            return None
        if weight is not None and not keeps_dtype(weight, x):
            return None
        sizes = self._sizes(edge_index, size, kwargs)
        if sizes is None or sizes[1] != x.shape[0]:
            return None
        if weight is not None and tuple(weight.shape) != (edge_index.shape[1], *x.shape[1:-1]):
            return None
        adjacency = adjacency_of(self.conv, edge_index, *sizes)
        if adjacency is None:
            return None
        if self.reduce is None:
            if weight is not None:
                return None
            turned = transposed_if(adjacency, x)
            return self.update(self._reduce(adjacency, adjacency.col, x, turned), kwargs)
        self.count()
        value = None if weight is None else adjacency.sort(weight)
        return self.update(aggregate(adjacency, x, self.reduce, value), kwargs)

    def _reduce(self, adjacency: Adjacency, rows: Tensor, x: Tensor, transposed: Transposed | None) -> Tensor:
        """Return all reductions of the rows of x that the entries of the graph refer to."""
        self.count()
        return self.reduction.of_rows(adjacency.rowptr, rows, x, transposed)

    def _reduce_messages(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor | None:
        conv = self.conv
        if conv.node_dim not in (0, -2):
            return None
        sizes = conv._check_input(edge_index, size)
        collected = conv.collect(edge_index, size=sizes, **kwargs)._asdict()
        messages = conv.message(**conv.inspector.collect_param_data("message", collected))
        targets = collected["dim_size"]
        at_front = messages.dim() >= 2 and conv.node_dim in (0, -messages.dim())
        adjacency = None
        fits = at_front and targets is not None and messages.shape[0] == edge_index.shape[1]
        if fits and not is_small(edge_index, messages.shape[1:].numel()):
            # Indices of sources are not looked up again: `message` has them, or does not need them.
            known = [count for count in sizes if count is not None]
            adjacency = adjacency_of(conv, edge_index, targets, max(targets, *known))
        if adjacency is None:
            arguments = conv.inspector.collect_param_data("aggregate", collected)
            output = conv.aggregate(messages, **arguments)
        else:
            transposed = adjacency.as_segments() if needs_gradient(messages) else None
            output = self._reduce(adjacency, adjacency.order, messages, transposed)
        return conv.update(output, **conv.inspector.collect_param_data("update", collected))

    def update(self, output: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Run the layer's own `update` on the reduced messages [N, ...], with the `kwargs` that it accepts."""
        names = self.conv.inspector.get_param_names("update")
        return self.conv.update(output, **{name: kwargs[name] for name in names})
