"""Graphs as matrices: `adj_t` of PyTorch Geometric, whose rows are the targets and whose columns are the sources.

Supported are `torch.sparse` matrices (CSR, CSC and COO) and objects with `csr()` and `sparse_sizes()` such as
torch_sparse.SparseTensor. If all entries are one, layers get the edges instead of the matrix. Otherwise, layers whose fused path
(`message_and_aggregate`) is the product with the matrix get that product.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.check import compare
from hf_cpu_accel.graph.accepted_arguments import takes
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.graph.message import Message, watch
from hf_cpu_accel.lazy.remember import outside_inference_mode
from hf_cpu_accel.ops.derivatives import needs_gradient
from hf_cpu_accel.ops.sparse import spmm_reduce
from hf_cpu_accel.ops.sparse_reference import row_of_edge
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.tolerance import MATRIX_PRODUCT

MOST_MATRICES = 16
_HOOKS = ("_message_and_aggregate_forward_pre_hooks", "_message_and_aggregate_forward_hooks")
_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


class Propagate(Protocol):
    """The part of `propagate.FastPropagate` that this file uses."""

    conv: MessagePassing
    message: Message | None
    reduce: str | None

    def __call__(self, edge_index: Any, *args: Any, size: Any = None, **kwargs: Any) -> Any: ...

    def update(self, output: Tensor, kwargs: dict[str, Any]) -> Tensor: ...


@dataclass(frozen=True)
class MatrixEdges:
    """The entries of a matrix.

    Attributes:
        edge_index: [2, E] int64, sources and targets.
        values: [E], or None if all are one.
        sources, targets: the matrix is [targets, sources].
        dtype: the dtype of the entries, or None if the matrix stores no values.
        has_loops: whether an entry is on the diagonal.
    """

    edge_index: Tensor
    values: Tensor | None
    sources: int
    targets: int
    dtype: torch.dtype | None
    has_loops: bool

    def fits(self, x: object) -> bool:
        """Return whether x, or the pair x of sources and targets, has the shape of features of these nodes."""
        source, target = (
            (x, x) if isinstance(x, Tensor) else x if isinstance(x, tuple) and len(x) == 2 else (None, None)
        )
        return (
            isinstance(source, Tensor)
            and source.dim() >= 2
            and source.shape[0] == self.sources
            and (target is None or target.shape[0] == self.targets)
            and self.dtype in (None, source.dtype)
        )


class MatrixCache:
    """A cache of the edges of the last few matrices, referenced weakly and recognized by identity and version."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._entries: OrderedDict[tuple[Any, ...], tuple[weakref.ref[Any], MatrixEdges | None]] = (
            OrderedDict()
        )

    def get(self, matrix: Any) -> MatrixEdges | None:
        """Return the edges of `matrix`; None if it is not a supported matrix, has gradients, or is not on the CPU."""
        parts = _parts(matrix)
        if parts is None:
            return None
        tensors = [part for part in parts if part is not None]
        if any(
            part.is_inference() or part.requires_grad or part.device.type != "cpu" or part.dim() != 1
            for part in tensors
        ):
            return None
        key = (id(matrix), *((part.data_ptr(), part._version, part.shape) for part in tensors))
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry[0]() is matrix:
                self._entries.move_to_end(key)
                return entry[1]
        edges = outside_inference_mode(lambda: _edges(matrix, *parts))
        with self._lock:
            self._entries[key] = weakref.ref(matrix, lambda _: self._forget(key)), edges
            while len(self._entries) > MOST_MATRICES:
                self._entries.popitem(last=False)
        return edges

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: tuple[Any, ...]) -> None:
        self._entries.pop(key, None)  # see AdjacencyCache._forget


matrices = MatrixCache()
"""The matrices of this process."""


def _parts(matrix: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the pointers and indices of a CSR or CSC, or both indices of a COO, and the values."""
    if torch.compiler.is_compiling():
        return None
    if not isinstance(matrix, Tensor):
        return (
            matrix.csr()
            if callable(getattr(matrix, "csr", None)) and hasattr(matrix, "sparse_sizes")
            else None
        )
    if matrix.dim() != 2 or matrix.layout not in _LAYOUTS or matrix.requires_grad:
        return None
    if matrix.layout is torch.sparse_csr:
        return matrix.crow_indices(), matrix.col_indices(), matrix.values()
    if matrix.layout is torch.sparse_csc:
        return matrix.ccol_indices(), matrix.row_indices(), matrix.values()
    if not matrix.is_coalesced():  # duplicate entries would have to be summed first
        return None
    row, col = matrix._indices()
    return row, col, matrix._values()


def _edges(matrix: Any, first: Tensor, second: Tensor, values: Tensor | None) -> MatrixEdges:
    layout = matrix.layout if isinstance(matrix, Tensor) else torch.sparse_csr
    rows, cols = matrix.shape if isinstance(matrix, Tensor) else matrix.sparse_sizes()
    if layout is not torch.sparse_coo:
        first = row_of_edge(first, len(second))
    target, source = (second, first) if layout is torch.sparse_csc else (first, second)
    ones = values is None or bool((values == 1).all())
    return MatrixEdges(
        torch.stack([source.long(), target.long()]),
        # A copy, because the tensor of values may keep the matrix alive.
        None if ones or values is None else values.clone(),
        cols,
        rows,
        None if values is None else values.dtype,
        bool((source == target).any()),
    )


def _edges_for(conv: MessagePassing, matrix: Any) -> MatrixEdges | None:
    watched = any(getattr(conv, hooks) for hooks in _HOOKS)
    return None if watched or conv.flow == "target_to_source" else matrices.get(matrix)


def with_plain_edges(
    conv: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the matrix among the arguments (x, matrix, ...) of a layer's forward by its edges, if all entries are one.

    A matrix with self-loops is not replaced: layers that add self-loops treat those of a matrix differently.
    """
    matrix = args[1] if len(args) > 1 else kwargs.get("edge_index")
    edges = _edges_for(conv, matrix)
    if edges is None or edges.values is not None or edges.has_loops or edges.sources != edges.targets:
        return args, kwargs
    if not edges.fits(args[0] if args else kwargs.get("x")):
        return args, kwargs
    if len(args) > 1:
        return (args[0], edges.edge_index, *args[2:]), kwargs
    return args, {**kwargs, "edge_index": edges.edge_index}


# Arguments that `collect` reads from the entries of a matrix if they are not passed.
_FROM_ENTRIES = ("edge_weight", "edge_attr", "edge_type", "adj_t", "edge_index", "ptr")


def propagate_matrix(propagate: Propagate, matrix: Any, kwargs: dict[str, Any]) -> Any:
    """Compute `propagate` for a graph that is a matrix; None if it is not a matrix, or the kernels do not support the call."""
    conv = propagate.conv
    edges = _edges_for(conv, matrix)
    if edges is None:
        return None
    message, reduce = propagate.message, propagate.reduce
    if not takes(conv, edges.edge_index):
        return None
    if message is not None and reduce is not None and not message.heads and conv.fuse:
        x: Any = kwargs.get(message.features)
        weighted = message.weight is not None and kwargs.get(message.weight) is not None
        if weighted or not edges.fits(x) or not _is_product(conv, message, reduce):
            return None
        return _multiply(propagate, reduce, edges, x if isinstance(x, Tensor) else x[0], kwargs)
    missing = {name for name in conv._user_args if kwargs.get(name) is None}
    if conv.fuse or edges.values is not None or missing.intersection(_FROM_ENTRIES):
        return None
    return propagate(edges.edge_index, size=(edges.sources, edges.targets), **kwargs)


def _multiply(
    propagate: Propagate, reduce: str, edges: MatrixEdges, x: Tensor, kwargs: dict[str, Any]
) -> Any:
    try:
        adjacency = adjacencies.get(edges.edge_index, "source_to_target", edges.targets, edges.sources)
    except RuntimeError:  # entries outside of the matrix: torch checks for them only if asked to
        return None
    value = None if edges.values is None else adjacency.sort(edges.values)
    transposed = adjacency.transposed() if needs_gradient(x) else None
    output = spmm_reduce(adjacency.rowptr, adjacency.col, value, x, reduce, transposed=transposed)
    return propagate.update(output, kwargs)


_products: weakref.WeakKeyDictionary[MessagePassing, bool] = weakref.WeakKeyDictionary()


def _is_product(conv: MessagePassing, message: Message, reduce: str) -> bool:
    """Return whether `message_and_aggregate` of a layer is the product of the matrix with the features, and nothing else."""
    known = _products.get(conv)
    if known is None:
        known = _products[conv] = any(_multiplies(conv, message, reduce, pair) for pair in (False, True))
    return known


def _multiplies(conv: MessagePassing, message: Message, reduce: str, pair: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    values, x = torch.randn(3, generator=generator), torch.randn(4, 5, generator=generator)
    matrix = torch.sparse_csr_tensor(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 3, 1]), values, size=(3, 4))
    others = dict.fromkeys(conv.inspector.get_param_names("message_and_aggregate"))
    if message.features not in others:
        return False
    arguments = {**others, message.features: (x, None) if pair else x}
    seen = watch(partial(conv.message_and_aggregate, matrix), arguments)
    if seen is None or not seen[1]:
        return False
    output, (*before, (_, arguments_of_product, product)) = seen
    product = product[0] if isinstance(product, tuple) else product
    operands = [argument for argument in arguments_of_product if argument is matrix or argument is x]
    only_it = not any(isinstance(argument, Tensor) for _, arguments, _ in before for argument in arguments)
    if product is not output or len(operands) != 2 or not only_it:
        return False
    return compare(output, torch.sparse.mm(matrix, x, reduce)).within(MATRIX_PRODUCT)
