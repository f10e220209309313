"""Graphs as matrices and edges with weights: served as stock serves them, remembered, and never stale."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.graph.adjacency import Adjacency
from hf_cpu_accel.graph.matrices import MatrixCache, matrices
from tests.hosts.pyg_classes import FakeSparseTensor

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")

NODES, FEATURES = 40, 12
LAYERS = {
    "gcn": lambda: pyg.GCNConv(FEATURES, 8),
    "gcn as it is": lambda: pyg.GCNConv(FEATURES, 8, normalize=False),
    "sage": lambda: pyg.SAGEConv(FEATURES, 8),
    "sage max": lambda: pyg.SAGEConv(FEATURES, 8, aggr="max"),
    "gin": lambda: pyg.GINConv(nn.Linear(FEATURES, 8)),
    "graph": lambda: pyg.GraphConv(FEATURES, 8),
    "tag": lambda: pyg.TAGConv(FEATURES, 8),
    "gat": lambda: pyg.GATConv(FEATURES, 4, heads=2),
    "edge": lambda: pyg.EdgeConv(nn.Linear(2 * FEATURES, 8)),
}
SERVED_WITH_WEIGHTS = ("gcn", "gcn as it is", "sage", "sage max", "gin", "graph", "tag")


def dense(weighted: bool, loops: bool = False) -> Tensor:
    matrix = (torch.rand(NODES, NODES) < 0.15) * (torch.rand(NODES, NODES) + 0.5 if weighted else 1.0)
    matrix[7] = 0.0  # a node without neighbors
    return matrix if loops else matrix.fill_diagonal_(0.0)


def as_layout(matrix: Tensor, layout: str) -> Tensor:
    if layout == "coo":
        return matrix.to_sparse_coo().coalesce()
    return matrix.to_sparse_csr() if layout == "csr" else matrix.to_sparse_csc()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


@pytest.mark.filterwarnings("ignore:Converting sparse", "ignore:Sparse")
@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weights"])
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("name", LAYERS)
def test_layouts(name: str, layout: str, weighted: bool, x: Tensor) -> None:
    """As stock on the CSR of the matrix; where stock refuses a layout, ours may do so too."""
    conv, plain = LAYERS[name]().eval(), dense(weighted)
    expected, matrix = conv(x, as_layout(plain, "csr")).detach(), as_layout(plain, layout)
    refusals = (NotImplementedError, RuntimeError, ValueError)
    try:
        conv(x, matrix)
        stock_takes_it = True
    except refusals:
        stock_takes_it = False
    accelerate_for_cpu(conv, dtype="float32")
    try:
        output = conv(x, matrix).detach()
    except refusals:
        assert not stock_takes_it
        return
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert vars(conv)["propagate"].served > 0 or (weighted and name not in SERVED_WITH_WEIGHTS)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_gradients_and_loops(x: Tensor) -> None:
    """Self-loops of a matrix count twice in stock GCN: the layer sees to such matrices itself."""
    for loops in (False, True):
        matrix = dense(weighted=False, loops=loops).to_sparse_csr()
        conv, grads = pyg.GCNConv(FEATURES, 8), []
        for candidate in (conv, accelerate_for_cpu(copy.deepcopy(conv))):
            leaf = x.clone().requires_grad_()
            output = candidate(leaf, matrix)
            grads.append(
                [output.detach(), *torch.autograd.grad(output.square().sum(), [leaf, candidate.lin.weight])]
            )
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_matrices_are_remembered_and_never_stale(x: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.GCNConv(FEATURES, 8, normalize=False).eval(), dtype="float32")
    stock, cache = restore(copy.deepcopy(conv)), MatrixCache()
    matrix = dense(weighted=True).to_sparse_csr()
    assert cache.get(matrix) is cache.get(matrix)
    edits: tuple[Callable[[Tensor], object], ...] = (
        lambda matrix: None,
        lambda matrix: matrix.values().mul_(2),
        lambda matrix: matrix.col_indices().zero_(),
        lambda matrix: matrix.copy_(3 * matrix),
        lambda matrix: matrix.values().fill_(1),
    )
    for edit in edits:
        before = cache.get(matrix)
        edit(matrix)
        torch.testing.assert_close(conv(x, matrix), stock(x, matrix), rtol=1e-4, atol=1e-5)
    assert cache.get(matrix) is not before
    assert cache.get(matrix).values is None
    del matrix
    gc.collect()
    assert len(cache) == 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_hooks_and_bad_matrices_go_to_the_layer(x: Tensor) -> None:
    conv, matrix, seen = pyg.SAGEConv(FEATURES, 8), dense(weighted=False).to_sparse_csr(), []
    accelerate_for_cpu(conv)
    handle = conv.register_message_and_aggregate_forward_hook(lambda *_: seen.append(1))
    conv(x, matrix)
    handle.remove()
    assert seen == [1]
    with pytest.raises((RuntimeError, ValueError)) as ours:
        conv(x[:-1], matrix)
    with pytest.raises(type(ours.value)):
        restore(conv)(x[:-1], matrix)


@pytest.mark.parametrize("name", ["gcn", "sage max", "gat"])
def test_matrices_without_entries(name: str, x: Tensor) -> None:
    conv, plain = LAYERS[name]().eval(), dense(weighted=False)
    expected = conv(x, plain.t().nonzero().t())
    torch.testing.assert_close(
        accelerate_for_cpu(conv)(x, FakeSparseTensor(plain)), expected, rtol=1e-4, atol=1e-5
    )
    assert matrices.get(torch.ones(2, 2)) is None


def test_weights_of_gcn(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalized once per graph and weights, anew after either was written to; loops keep the weight they came with."""
    edge_index = torch.randint(0, NODES, (2, 150))
    edge_index[:, :5] = torch.arange(5)  # loops, none twice
    edge_index[1, 5:][edge_index[0, 5:] == edge_index[1, 5:]] += 1
    edge_index %= NODES
    weight, sums = torch.rand(150), []
    degrees = Adjacency._with_loops
    monkeypatch.setattr(Adjacency, "_with_loops", lambda *a: sums.append(1) or degrees(*a))
    for options in ({}, {"add_self_loops": False}, {"flow": "target_to_source"}):
        conv = pyg.GCNConv(FEATURES, 8, **options).eval()
        stock = copy.deepcopy(conv)
        accelerate_for_cpu(conv, dtype="float32")
        sums.clear()
        for edit in (
            lambda: None,
            lambda: weight.mul_(0.5),
            lambda: edge_index[0, 7].fill_(3),
            lambda: weight.neg_(),
        ):
            edit()
            for _ in range(2):
                expected = stock(x, edge_index, weight)
                torch.testing.assert_close(
                    conv(x, edge_index, weight), expected, rtol=1e-4, atol=1e-5, equal_nan=True
                )
        assert len(sums) == 4
        weight.neg_()
        with torch.inference_mode():
            torch.testing.assert_close(
                conv(x, edge_index, weight.clone()), stock(x, edge_index, weight), rtol=1e-4, atol=1e-5
            )
        learned = weight.clone().requires_grad_()
        grads = [torch.autograd.grad(layer(x, edge_index, learned).sum(), learned) for layer in (stock, conv)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        for shape in ((149,), (151,)):
            for candidate in (stock, conv):
                with pytest.raises((IndexError, RuntimeError)):
                    candidate(x, edge_index, torch.rand(shape))


def test_torch_script_compiles_the_layer_as_it_was(x: Tensor) -> None:
    edge_index = torch.randint(0, NODES, (2, 150))
    conv = accelerate_for_cpu(pyg.GCNConv(FEATURES, 8).eval(), dtype="float32")
    scripted = torch.jit.script(conv)
    torch.testing.assert_close(scripted(x, edge_index), conv(x, edge_index), rtol=1e-4, atol=1e-5)
    assert "propagate" in vars(conv)


def test_sparse_features_go_to_the_layer() -> None:
    edge_index, x = torch.randint(0, NODES, (2, 150)), torch.randn(NODES, FEATURES).relu()
    conv = pyg.GCNConv(FEATURES, 2 * FEATURES).eval()
    expected = conv(x, edge_index)
    accelerate_for_cpu(conv, dtype="float32")
    torch.testing.assert_close(conv(x.to_sparse(), edge_index), expected, rtol=1e-4, atol=1e-5)
