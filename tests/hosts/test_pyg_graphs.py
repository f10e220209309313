"""Graphs in every form that PyTorch Geometric takes, wrong ones and edited ones too; layers share what was made of them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import EdgeIndex

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.graph.cache import MOST_GRAPHS, AdjacencyCache, adjacencies
from tests.hosts.pyg_layers import EDGES, FEATURES, NODES, TYPES, mlp, served

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")


def test_bipartite_graphs(edge_index: Tensor) -> None:
    source, target = torch.randn(NODES, 12), torch.randn(NODES - 5, 7)
    for conv in (pyg.SAGEConv((12, 7), 4), pyg.SAGEConv((12, 7), 20, aggr="max"), pyg.GraphConv((12, 7), 4)):
        expected = conv((source, target), edge_index)
        accelerate_for_cpu(conv)
        torch.testing.assert_close(conv((source, target), edge_index), expected, rtol=1e-4, atol=1e-4)
        assert vars(conv)["propagate"].served == 1
    conv = pyg.SAGEConv((12, 7), 4)
    expected = conv((source, None), edge_index, size=(NODES, NODES - 5))
    accelerate_for_cpu(conv)
    torch.testing.assert_close(conv((source, None), edge_index, size=(NODES, NODES - 5)), expected)


def test_relations_of_bipartite_graphs_and_of_nodes_without_features(edge_index: Tensor) -> None:
    source, target = torch.randn(NODES, 12), torch.randn(NODES - 5, 7)
    conv = pyg.RGCNConv((12, 7), 4, 3)
    expected = conv((source, target), edge_index, **TYPES)
    accelerate_for_cpu(conv)
    torch.testing.assert_close(conv((source, target), edge_index, **TYPES), expected, rtol=1e-4, atol=1e-4)
    for cls, options in ((pyg.RGCNConv, {"num_bases": 2}), (pyg.FastRGCNConv, {"aggr": "sum"})):
        conv = cls(NODES, 10, 3, **options)
        expected = conv(None, edge_index, **TYPES)
        accelerate_for_cpu(conv)
        torch.testing.assert_close(conv(None, edge_index, **TYPES), expected, rtol=1e-4, atol=1e-4)
        assert served(conv) == 1


def test_types_of_edges_that_are_edited_or_not_there(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.RGCNConv(FEATURES, 10, 3))
    types = TYPES["edge_type"].clone()
    for edit in (lambda: None, lambda: types.fill_(2)):
        edit()
        expected = restore(copy.deepcopy(conv))(x, edge_index, types)
        torch.testing.assert_close(conv(x, edge_index, types), expected, rtol=1e-4, atol=1e-4)
    assert served(conv) == 2
    types[:9] = 7
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):  # the layer's own
        conv(x, edge_index, types)


def test_other_forms_of_edges(x: Tensor, edge_index: Tensor) -> None:
    """int32, EdgeIndex and a transposed view are served; a sparse matrix goes to the layer's own path."""
    conv = pyg.SAGEConv(FEATURES, 10)
    expected = conv(x, edge_index)
    accelerate_for_cpu(conv)
    in_rows = edge_index.t().contiguous().t()
    for calls, edges in enumerate(
        (edge_index.int(), EdgeIndex(edge_index, sparse_size=(NODES, NODES)), in_rows), start=1
    ):
        torch.testing.assert_close(conv(x, edges), expected, rtol=1e-4, atol=1e-4)
        assert vars(conv)["propagate"].served == calls
    ones = torch.ones(EDGES)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (NODES, NODES)).coalesce()
    graph = torch.sparse_csr_tensor(*_csr_parts(matrix), size=(NODES, NODES))
    stock = restore(copy.deepcopy(conv))
    torch.testing.assert_close(conv(x, graph), stock(x, graph))


def _csr_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    csr = matrix.to_sparse_csr()
    return csr.crow_indices(), csr.col_indices(), csr.values()


@pytest.mark.parametrize("bad", [-1, NODES])
def test_the_layers_own_error_for_bad_indices(bad: int, x: Tensor, edge_index: Tensor) -> None:
    for conv in (pyg.SAGEConv(FEATURES, 4), pyg.EdgeConv(mlp(2 * FEATURES, 4))):
        for side in (0, 1):
            edges = edge_index.clone()
            edges[side, 3] = bad
            errors = []
            for candidate in (conv, accelerate_for_cpu(copy.deepcopy(conv))):
                with pytest.raises((IndexError, RuntimeError, ValueError)) as error:
                    candidate(x, edges)
                errors.append(str(error.value))
            assert errors[0] == errors[1]


def test_edits_of_the_edges_are_seen(x: Tensor, edge_index: Tensor) -> None:
    conv = pyg.SAGEConv(FEATURES, 10).eval()
    accelerate_for_cpu(conv)
    for edit in (
        lambda: None,
        lambda: edge_index[0].fill_(3),
        lambda: edge_index.mul_(0).add_(7),
        lambda: edge_index.copy_(torch.randint(0, NODES, (2, EDGES))),
        lambda: edge_index.view(-1)[::3].zero_(),
        lambda: edge_index.set_(torch.randint(0, NODES, (2, EDGES))),
        lambda: edge_index.resize_(2, 40),
    ):
        conv(x, edge_index)
        edit()
        expected = restore(copy.deepcopy(conv))(x, edge_index)
        torch.testing.assert_close(conv(x, edge_index), expected, rtol=1e-4, atol=1e-4)


def test_graphs_are_shared_bounded_and_let_go(edge_index: Tensor) -> None:
    cache = AdjacencyCache()
    first = cache.get(edge_index, "source_to_target", NODES, NODES)
    assert cache.get(edge_index, "source_to_target", NODES, NODES) is first
    assert cache.get(edge_index.clone(), "source_to_target", NODES, NODES) is not first
    assert cache.get(edge_index, "target_to_source", NODES, NODES) is not first
    assert cache.get(edge_index, "source_to_target", NODES, NODES, loops=NODES) is not first
    gc.collect()
    assert len(cache) == 3  # the clone is gone
    graphs = [edge_index.clone() for _ in range(3 * MOST_GRAPHS)]
    for graph in graphs:
        cache.get(graph, "source_to_target", NODES, NODES)
    assert len(cache) == MOST_GRAPHS
    del graphs, graph
    gc.collect()
    assert len(cache) <= 3
    with torch.inference_mode():
        inside = edge_index.clone()
        known = cache.get(inside, "source_to_target", NODES, NODES)
        assert cache.get(inside, "source_to_target", NODES, NODES) is known
        inside[0, 0] = (inside[0, 0] + 1) % NODES  # which no version counts
        assert cache.get(inside, "source_to_target", NODES, NODES) is not known


def test_layers_of_a_model_share_the_graph(x: Tensor, edge_index: Tensor) -> None:
    adjacencies.clear()
    model = accelerate_for_cpu(pyg.GIN(FEATURES, 16, num_layers=3).eval(), dtype="float32")
    with torch.no_grad():
        model(x, edge_index)
    assert len(adjacencies) == 1


def test_training_after_inference_mode_on_the_same_graph(x: Tensor, edge_index: Tensor) -> None:
    """As Lightning's sanity check before the first epoch has it; the graph may be a matrix, too."""
    dense = torch.zeros(NODES, NODES)
    dense[edge_index[1], edge_index[0]] = 1.0
    dense.fill_diagonal_(0.0)
    weight = torch.rand(EDGES)
    layers = (
        (pyg.GCNConv(FEATURES, 4), {}),
        (pyg.GCNConv(FEATURES, 4), {"edge_weight": weight}),
        (pyg.GATConv(FEATURES, 4), {}),
        (pyg.SAGEConv(FEATURES, 4, aggr=["mean", "std"]), {}),
        (pyg.EdgeConv(mlp(2 * FEATURES, 4)), {}),
        (pyg.RGCNConv(FEATURES, 4, 3), TYPES),
    )
    for conv, arguments in layers:
        for form in (lambda: edge_index.clone(), dense.to_sparse_csr):
            edges = form()
            if arguments and edges.layout is not torch.strided:
                continue  # these arguments are of the edges
            accelerate_for_cpu(conv.train())
            with torch.inference_mode():
                conv.eval()(x, edges, **arguments)
            conv.train()(x, edges, **arguments).sum().backward()
            ours = [parameter.grad for parameter in conv.parameters()]
            conv.zero_grad()
            restore(conv)
            conv(x, edges, **arguments).sum().backward()
            for grad, parameter in zip(ours, conv.parameters(), strict=True):
                torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-4)
            conv.zero_grad()


@pytest.mark.parametrize("aggr", ["min", "max"])
def test_no_share_of_a_gradient_is_lost_among_ties(aggr: str, edge_index: Tensor) -> None:
    """Where the extreme is 0, scatter_reduce counts its initial value as one more tie; nowhere else do gradients differ."""
    x = torch.randint(-2, 3, (NODES, 4)).float().requires_grad_()
    conv = pyg.SimpleConv(aggr=aggr)
    output = conv(x, edge_index).detach()
    has_edges = torch.bincount(edge_index[1], minlength=NODES) > 0
    weights = torch.rand_like(output) * has_edges.unsqueeze(1)

    def gradient(layer: pyg.SimpleConv, kept: Tensor | float) -> Tensor:
        return torch.autograd.grad((layer(x, edge_index) * weights * kept).sum(), x)[0]

    ours = accelerate_for_cpu(copy.deepcopy(conv))
    torch.testing.assert_close(gradient(ours, output != 0), gradient(conv, output != 0))
    torch.testing.assert_close(gradient(ours, 1.0).sum(), weights.sum())
    assert served(ours) == 2


def test_graphs_and_weights_written_past_torch(x: Tensor, edge_index: Tensor) -> None:
    weight = torch.rand(EDGES)
    conv = accelerate_for_cpu(pyg.GCNConv(FEATURES, 4).eval(), dtype="float32")
    for edit in (lambda: None, lambda: edge_index.data.add_(1), lambda: weight.numpy().__imul__(2)):
        edit()
        expected = restore(copy.deepcopy(conv))(x, edge_index, weight)
        torch.testing.assert_close(conv(x, edge_index, weight), expected, rtol=1e-4, atol=1e-4)
    assert served(conv) == 3
