"""Every layer class x both flows x each form of nodes and edges: the outputs of PyTorch Geometric, or its errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv

from hf_cpu_accel import accelerate_for_cpu, explain
from tests.hosts.pyg_classes import (
    CLASSES,
    EDGES,
    FEATURES,
    OTHER_TARGETS,
    SOURCES,
    TARGETS,
    FakeSparseTensor,
    arguments_of,
)

pytestmark = [
    pytest.mark.usefixtures("small_graphs_are_served"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:Converting"),
]

FLOWS = ("source_to_target", "target_to_source")


def nodes(generator: torch.Generator) -> dict[str, Any]:
    """The features of the nodes in each form: one tensor, or a pair of sources and targets."""
    source, target = (torch.randn(count, FEATURES, generator=generator) for count in (SOURCES, TARGETS))
    return {
        "tensor": source,
        "pair": (source, target),
        "pair with None": (source, None),
        "fewer targets": (source, target[:OTHER_TARGETS]),
        "fewer sources": (source[:OTHER_TARGETS], target),
    }


def graphs(x: Any, generator: torch.Generator) -> dict[str, Any]:
    """Edges among the nodes `x` in each form."""
    first, second = (x, x) if isinstance(x, Tensor) else (x[0], x[0] if x[1] is None else x[1])
    size = len(first), len(second)
    edge_index = torch.randint(0, min(size), (2, EDGES), generator=generator)
    dense = torch.zeros(size[::-1])
    dense[edge_index[1], edge_index[0]] = 1.0
    return {
        "edge_index": edge_index,
        "EdgeIndex": EdgeIndex(edge_index, sparse_size=size),
        "EdgeIndex by target": EdgeIndex(edge_index, sparse_size=size).sort_by("col")[0],
        "EdgeIndex of another size": EdgeIndex(edge_index, sparse_size=(size[0] + 9, size[1] + 5)),
        "CSR": dense.to_sparse_csr(),
        "COO": dense.to_sparse_coo().coalesce(),
        "SparseTensor": FakeSparseTensor(dense),
    }


def call(conv: nn.Module, x: Any, edges: Any, arguments: dict[str, Any]) -> Tensor | Exception:
    """The output of the layer, or the error that it raises."""
    matrix = edges.matrix if isinstance(edges, FakeSparseTensor) else edges
    if matrix.layout is not torch.strided:  # has each pair of nodes once
        arguments = {
            name: value[: matrix._nnz()] if len(value) == EDGES else value
            for name, value in arguments.items()
        }
    try:
        output = conv(x, edge_index=edges, **arguments)
    except Exception as error:
        return error
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_outputs_are_those_of_the_layer(name: str, flow: str) -> None:
    generator = torch.Generator().manual_seed(0)
    conv = CLASSES[name](flow=flow).eval()
    ours = accelerate_for_cpu(copy.deepcopy(conv), dtype="float32")
    arguments = arguments_of(name, generator)
    changes_edges = getattr(conv, "add_self_loops", False) or getattr(conv, "normalize", False)
    reads_sparse_tensor = changes_edges or name == "MFConv"
    equal = 0
    for form, x in nodes(generator).items():
        if name == "MFConv" and flow == "target_to_source" and form == "fewer targets":
            continue  # the layer returns rows that it never writes
        for kind, edges in graphs(x, generator).items():
            if kind == "SparseTensor" and reads_sparse_tensor:
                continue  # the layer's own code calls functions of torch_sparse on a real one
            # The layer cannot read the stand-in for a SparseTensor; it is the CSR matrix.
            readable = edges.matrix if isinstance(edges, FakeSparseTensor) else edges
            expected, output = call(conv, x, readable, arguments), call(ours, x, edges, arguments)
            if isinstance(output, Exception):
                # What goes to the layer's own code is refused there, as a SparseTensor's stand-in is.
                assert isinstance(expected, type(output)) or kind == "SparseTensor", (form, kind, output)
                continue
            assert isinstance(expected, Tensor), (form, kind, expected)
            torch.testing.assert_close(
                output, expected, rtol=1e-4, atol=1e-4, msg=lambda m, at=(form, kind): f"{at}: {m}"
            )
            equal += 1
    assert equal > 0


def test_a_layer_with_a_propagate_of_its_own_is_left(x: Tensor, edge_index: Tensor) -> None:
    class Doubled(GCNConv):
        def propagate(self, edge_index: Tensor, size: Any = None, **arguments: Any) -> Tensor:
            return 2 * arguments["x"]

    conv = Doubled(x.shape[1], 4)
    expected = conv(x, edge_index)
    accelerate_for_cpu(conv)
    assert torch.equal(conv(x, edge_index), expected)
    assert "overrides propagate" in explain(conv).left[0].reason
