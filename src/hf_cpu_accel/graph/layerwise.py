"""`inference`: the embeddings of all nodes of a large graph, computed layer by layer and chunk by chunk.

A chunk of nodes needs only the features of its neighbors. So each layer is computed for a few thousand nodes at a time, on a small
graph of these nodes and their neighbors. Inputs and outputs may be files. Hamilton, Ying & Leskovec 2017, arXiv:1706.02216, section
3.1, is the same with a sample of the neighbors.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_cpu_accel.check import compare
from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.graph.forked import share_out, shared
from hf_cpu_accel.ops.sparse_reference import row_of_edge
from hf_cpu_accel.tolerance import LAYERWISE, Closeness


@dataclass(frozen=True)
class _Chunk:
    """Nodes [begin, end), and the edges to them with new node numbers: first these nodes, then the other sources."""

    begin: int
    end: int
    nodes: Tensor  # [n] int64, first the nodes of the chunk
    edge_index: Tensor  # [2, E] int64
    entries: slice  # of the adjacency


@torch.no_grad()
def inference(
    model: Any,
    x: Tensor,
    edge_index: Tensor,
    *,
    batch_size: int = 32_768,
    processes: int = 1,
    out: str | Path | None = None,
    progress_bar: bool = False,
) -> Tensor:
    """Compute `model(x, edge_index)` in memory that does not grow with the number of nodes.

    Unlike `BasicGNN.inference` this needs no loader, and uses the degrees of the whole graph.

    Args:
        model: a model of `torch_geometric.nn.models` (GCN, GraphSAGE, GIN, GAT, EdgeCNN, PNA) in eval mode, with `jk` None or
            "last"; accelerated or not.
        x: [N, in_channels]; may be mapped from a file (`torch.from_file`, or `torch.from_numpy` of a `numpy.memmap`), since it is
            read in chunks.
        edge_index: [2, E] int64 or int32, sources and targets.
        batch_size: the number of nodes per chunk. Memory holds a few times the features of these nodes and their neighbors.
        processes: the number of processes, including this one. The others are forked. The processes divide torch's threads among
            them and write to one result.
        out: a file for the result, which is mapped from it. Features between layers are then in temporary files in its folder. None
            for memory.
        progress_bar: show a progress bar with a step per chunk and layer.

    Returns:
        [N, out_channels], in the dtype of the model's outputs.

    Raises:
        TypeError: the model has no list of layers.
        ValueError: the model is in training mode, has another `jk`, or a layer reads nodes more than one edge away; batch_size or
            processes is below 1; x is not [N, in_channels].
        RuntimeError: an index is negative or not below N, or another process failed.
    """
    _check(model)
    if x.dim() != 2 or x.shape[1] != model.in_channels:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected [nodes, {model.in_channels}]")
    for name, count in (("batch_size", batch_size), ("processes", processes)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}: expected an integer of at least 1")
    if x.shape[0] == 0:
        return model(x, edge_index)
    steps = model.num_layers * -(-x.shape[0] // batch_size)
    with tqdm(total=steps, desc="Inference", disable=not progress_bar) as progress:
        file = None if out is None else Path(out)
        return _compute(model, x, edge_index, batch_size, file, processes, progress.update)


def _check(model: Any) -> None:
    if not all(
        hasattr(model, name) for name in ("convs", "norms", "inference_per_layer", "jk_mode", "in_channels")
    ):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a model of torch_geometric.nn.models with layers (convs)"
        )
    if model.training:
        raise ValueError("model is in training mode; call model.eval() first")
    if model.jk_mode not in (None, "last") or not isinstance(model.in_channels, int):
        raise ValueError(
            f"jk={model.jk_mode!r}, in_channels={model.in_channels!r}: expected jk=None or 'last', and an integer in_channels"
        )
    # Layers that read nodes more than one edge away, or norms that read other nodes, give another output on any graph.
    nodes, generator = 24, torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, nodes, (2, 90), generator=generator)
    parameter = next(model.parameters(), torch.empty(0))
    x = torch.randn(nodes, model.in_channels, generator=generator).to(parameter.dtype)
    expected, output = model(x, edge_index), _compute(model, x, edge_index, 7, None, 1, lambda: None)
    tolerance = LAYERWISE.of(parameter.dtype)
    if not compare(output, expected).within(Closeness(tolerance, tolerance * float(expected.abs().max()))):
        raise ValueError(
            "model: a layer reads nodes more than one edge away, or a norm reads other nodes, so computing layer by layer in "
            "batches would change its output; call the model on the full graph"
        )


def _compute(
    model: Any,
    x: Tensor,
    edge_index: Tensor,
    batch_size: int,
    out: Path | None,
    processes: int,
    update: Callable[[], object],
) -> Tensor:
    count = x.shape[0]
    with tempfile.TemporaryDirectory(dir=None if out is None else out.resolve().parent) as folder:
        for layer, conv in enumerate(model.convs):
            # GCN reads the degrees of the sources too, so its weights are computed on the whole graph.
            normalizes = (
                isinstance(getattr(conv, "normalize", None), bool)
                and hasattr(conv, "add_self_loops")
                and conv.normalize
            )
            loops = count if normalizes and conv.add_self_loops else -1
            adjacency = adjacencies.get(edge_index, conv.flow, count, count, loops)
            weights = adjacency.normalized() if normalizes else None
            file = (
                None
                if out is None
                else out
                if layer == len(model.convs) - 1
                else Path(folder) / f"layer{layer}"
            )
            x = _layer(model, layer, x, _Chunks(adjacency, batch_size), weights, file, processes, update)
    return x


def _layer(
    model: Any,
    layer: int,
    x: Tensor,
    chunks: _Chunks,
    weights: Tensor | None,
    file: Path | None,
    processes: int,
    update: Callable[[], object],
) -> Tensor:
    """Return the outputs of a layer for all nodes. The first chunk determines their shape and dtype."""

    def rows_of(number: int) -> tuple[_Chunk, Tensor]:
        chunk = chunks.chunk(number)
        return chunk, _run(model, layer, x.index_select(0, chunk.nodes), chunk, weights)

    chunk, rows = rows_of(0)
    result = _allocate(x.shape[0], rows, file, processes > 1)

    def compute(number: int) -> None:
        chunk, rows = rows_of(number + 1)
        result[chunk.begin : chunk.end] = rows

    result[chunk.begin : chunk.end] = rows
    update()
    share_out(compute, chunks.count - 1, min(processes, max(chunks.count - 1, 1)), update)
    return result


class _Chunks:
    """All nodes of a graph in chunks of `size`."""

    def __init__(self, adjacency: Adjacency, size: int) -> None:
        self._adjacency, self._size = adjacency, size
        self.count = -(-adjacency.targets // size)
        self._number = torch.full((adjacency.targets,), -1, dtype=torch.int32)  # of the nodes of a chunk

    def chunk(self, index: int) -> _Chunk:
        adjacency, begin = self._adjacency, index * self._size
        end = min(begin + self._size, adjacency.targets)
        entries = slice(int(adjacency.rowptr[begin]), int(adjacency.rowptr[end]))
        sources = adjacency.col[entries]
        near = torch.zeros(adjacency.targets, dtype=torch.bool)
        near[sources] = True
        near[begin:end] = False
        nodes = torch.cat([torch.arange(begin, end), near.nonzero().view(-1)])
        self._number[nodes] = torch.arange(len(nodes), dtype=torch.int32)
        targets = row_of_edge(adjacency.rowptr[begin : end + 1] - entries.start, len(sources)).int()
        edge_index = torch.stack([self._number[sources], targets]).long()
        return _Chunk(begin, end, nodes, edge_index, entries)


def _run(model: Any, layer: int, x: Tensor, chunk: _Chunk, weights: Tensor | None) -> Tensor:
    """Run a layer of the model, with the norm and activation after it, for the nodes of a chunk."""
    count = chunk.end - chunk.begin
    if weights is None:
        return model.inference_per_layer(layer, x, chunk.edge_index, count)
    conv = model.convs[layer]
    output = conv.propagate(chunk.edge_index, x=conv.lin(x), edge_weight=weights[chunk.entries])[:count]
    output = output if conv.bias is None else output + conv.bias
    last = layer == model.num_layers - 1
    if last and model.jk_mode is None:
        return output
    if model.act is not None and model.act_first:
        output = model.act(output)
    output = model.norms[layer](output)
    if model.act is not None and not model.act_first:
        output = model.act(output)
    return model.lin(output) if last and hasattr(model, "lin") else output


def _allocate(count: int, rows: Tensor, file: Path | None, is_shared: bool) -> Tensor:
    shape = count, *rows.shape[1:]
    if file is not None:
        return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=rows.dtype).view(shape)
    return shared(shape, rows.dtype) if is_shared else rows.new_empty(shape)
