"""`inference`: the embeddings of all nodes of a graph that is too large to be computed at once, layer by layer and chunk by chunk.

A chunk of nodes needs the features of their neighbours and nothing else, so that each layer is computed for a few thousand nodes at
a time, on a small graph of those and their neighbours, from features that may be in a file, into features that may be in one.
Hamilton, Ying & Leskovec 2017, arXiv:1706.02216, section 3.1, is the same with a sample of the neighbours.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.cache import adjacencies
from hf_cpu_accel.ops.sparse_reference import row_of_edge


@dataclass(frozen=True)
class _Chunk:
    """Nodes [begin, end), and the edges to them, numbered anew: first these nodes, then the other sources."""

    begin: int
    end: int
    nodes: Tensor  # [n] int64, of which the first are the chunk's
    edge_index: Tensor  # [2, E] int64
    entries: slice  # of the adjacency


@torch.no_grad()
def inference(
    model: Any,
    x: Tensor,
    edge_index: Tensor,
    *,
    batch_size: int = 32_768,
    out: str | Path | None = None,
    progress_bar: bool = False,
) -> Tensor:
    """What `model(x, edge_index)` gives, in memory that does not grow with the features of the graph.

    Unlike `BasicGNN.inference` this needs no loader, and degrees are those of the whole graph.

    Args:
        model: one of `torch_geometric.nn.models` (GCN, GraphSAGE, GIN, GAT, EdgeCNN, PNA) in eval mode, with `jk` None or "last";
            accelerated or not.
        x: [N, features]; may be mapped from a file (`torch.from_file`, or `torch.from_numpy` of a `numpy.memmap`): it is read
            a chunk at a time.
        edge_index: [2, E] int64 or int32, sources and targets.
        batch_size: how many nodes are computed at a time. A few times the features of these and their neighbours are in memory.
        out: a file that the result is written to and mapped from; what lies between layers is then in files beside it, which
            are removed in the end. None for memory.
        progress_bar: show one, with a step per chunk and layer.

    Returns:
        [N, out_channels], in the dtype of the model's outputs.

    Raises:
        TypeError: a model that is not made of layers.
        ValueError: a model in training mode, with another `jk`, or whose layers look further than one edge; a batch_size
            below 1; an x that is not [N, in_channels].
        RuntimeError: an index that is negative or not below N.
    """
    _check(model)
    if x.dim() != 2 or x.shape[1] != model.in_channels:
        raise ValueError(f"x of shape {tuple(x.shape)}: expected [nodes, {model.in_channels}]")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1")
    if x.shape[0] == 0:
        return model(x, edge_index)
    steps = model.num_layers * -(-x.shape[0] // batch_size)
    with tqdm(total=steps, desc="Inference", disable=not progress_bar) as progress:
        return _compute(model, x, edge_index, batch_size, None if out is None else Path(out), progress.update)


def _check(model: Any) -> None:
    if not all(
        hasattr(model, name) for name in ("convs", "norms", "inference_per_layer", "jk_mode", "in_channels")
    ):
        raise TypeError(
            f"model is a {type(model).__name__}: expected one of torch_geometric.nn.models, made of layers"
        )
    if model.training:
        raise ValueError("model is in training mode: call model.eval()")
    if model.jk_mode not in (None, "last") or not isinstance(model.in_channels, int):
        raise ValueError(
            f"jk={model.jk_mode!r}, in_channels={model.in_channels!r}: expected None or 'last', and a number"
        )
    # Layers that look further than one edge, or norms that look at other nodes, show on any graph.
    nodes, generator = 24, torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, nodes, (2, 90), generator=generator)
    parameter = next(model.parameters(), torch.empty(0))
    x = torch.randn(nodes, model.in_channels, generator=generator).to(parameter.dtype)
    expected, output = model(x, edge_index), _compute(model, x, edge_index, 7, None, lambda: None)
    tolerance = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(output, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise ValueError(
            "model: a layer looks further than one edge, or a norm at other nodes: its chunks would be wrong"
        )


def _compute(
    model: Any, x: Tensor, edge_index: Tensor, batch_size: int, out: Path | None, update: Callable[[], object]
) -> Tensor:
    count = x.shape[0]
    with tempfile.TemporaryDirectory(dir=None if out is None else out.resolve().parent) as folder:
        for layer, conv in enumerate(model.convs):
            # GCN looks at the degrees of the sources, too: its weights are computed on the whole graph.
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
            result: Tensor | None = None
            for chunk in _chunks(adjacency, batch_size):
                rows = _run(model, layer, x.index_select(0, chunk.nodes), chunk, weights)
                result = _allocate(count, rows, file) if result is None else result
                result[chunk.begin : chunk.end] = rows
                update()
            assert result is not None
            x = result
    return x


def _chunks(adjacency: Adjacency, batch_size: int) -> Iterator[_Chunk]:
    number = torch.full((adjacency.targets,), -1, dtype=torch.int32)  # of the nodes of the chunk
    for begin in range(0, adjacency.targets, batch_size):
        end = min(begin + batch_size, adjacency.targets)
        entries = slice(int(adjacency.rowptr[begin]), int(adjacency.rowptr[end]))
        sources = adjacency.col[entries]
        near = torch.zeros(adjacency.targets, dtype=torch.bool)
        near[sources] = True
        near[begin:end] = False
        nodes = torch.cat([torch.arange(begin, end), near.nonzero().view(-1)])
        number[nodes] = torch.arange(len(nodes), dtype=torch.int32)
        targets = row_of_edge(adjacency.rowptr[begin : end + 1] - entries.start, len(sources)).int()
        yield _Chunk(begin, end, nodes, torch.stack([number[sources], targets]).long(), entries)


def _run(model: Any, layer: int, x: Tensor, chunk: _Chunk, weights: Tensor | None) -> Tensor:
    """A layer of the model, and what follows it, for the nodes of a chunk."""
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


def _allocate(count: int, rows: Tensor, file: Path | None) -> Tensor:
    shape = count, *rows.shape[1:]
    if file is None:
        return rows.new_empty(shape)
    return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=rows.dtype).view(shape)
