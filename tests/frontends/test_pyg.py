"""PyTorch Geometric layers: the same outputs, gradients and losses as without us, and nothing of it left after `restore`."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric import EdgeIndex

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.graph import propagate
from hf_cpu_accel.graph.cache import MOST_GRAPHS, AdjacencyCache, adjacencies

NODES, EDGES, FEATURES = 50, 300, 24


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


@pytest.fixture(autouse=True)
def small_graphs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as small as those of these tests would be left to some of the layers."""
    monkeypatch.setattr(propagate, "FEWEST_VALUES", 0)


@pytest.fixture
def edge_index() -> Tensor:
    """Unsorted, with self-loops, with pairs that come twice, and with nodes without edges."""
    edges = torch.randint(0, NODES - 5, (2, EDGES))
    edges[:, :8] = edges[0, :8]
    edges[:, 20:30] = edges[:, 40:50]
    return edges


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, FEATURES)


WEIGHT = {"edge_weight": torch.rand(EDGES)}
ATTRIBUTES = {"edge_attr": torch.rand(EDGES, 5)}
TYPES = {"edge_type": torch.randint(0, 3, (EDGES,))}
AGGREGATORS, SCALERS = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
DEGREES = torch.tensor([5, 3, 9, 8, 7, 6, 4, 3, 2, 1])


def pna(*more: str, scalers: tuple[str, ...] = (), **options: object) -> nn.Module:
    return pyg.PNAConv(FEATURES, 12, [*AGGREGATORS, *more], [*SCALERS, *scalers], DEGREES, **options)


LAYERS = {
    "gcn": (lambda: pyg.GCNConv(FEATURES, 10), {}),
    "gcn wider": (lambda: pyg.GCNConv(FEATURES, 40), {}),
    "gcn improved": (lambda: pyg.GCNConv(FEATURES, 10, improved=True), {}),
    "gcn no loops": (lambda: pyg.GCNConv(FEATURES, 10, add_self_loops=False, bias=False), {}),
    "gcn weighted": (lambda: pyg.GCNConv(FEATURES, 10), WEIGHT),
    "gcn reversed": (lambda: pyg.GCNConv(FEATURES, 10, flow="target_to_source"), {}),
    "sage mean": (lambda: pyg.SAGEConv(FEATURES, 10), {}),
    "sage sum": (lambda: pyg.SAGEConv(FEATURES, 40, aggr="sum", normalize=True), {}),
    "sage max": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="max", project=True), {}),
    "sage min": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="min", root_weight=False), {}),
    "sage reversed": (lambda: pyg.SAGEConv(FEATURES, 10, flow="target_to_source"), {}),
    "gin": (lambda: pyg.GINConv(mlp(FEATURES, 12), eps=0.3), {}),
    "gin trained eps": (lambda: pyg.GINConv(mlp(FEATURES, 12), train_eps=True), {}),
    "gine": (lambda: pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5), ATTRIBUTES),
    "graph": (lambda: pyg.GraphConv(FEATURES, 10, aggr="mean"), {}),
    "graph weighted": (lambda: pyg.GraphConv(FEATURES, 40, aggr="max"), WEIGHT),
    "gat": (lambda: pyg.GATConv(FEATURES, 8, heads=4), {}),
    "gat mean of heads": (lambda: pyg.GATConv(FEATURES, 7, heads=3, concat=False, residual=True), {}),
    "gat edges": (lambda: pyg.GATConv(FEATURES, 8, heads=2, edge_dim=5), ATTRIBUTES),
    "gatv2": (lambda: pyg.GATv2Conv(FEATURES, 8, heads=4), {}),
    "gatv2 shared": (lambda: pyg.GATv2Conv(FEATURES, 7, heads=3, concat=False, share_weights=True), {}),
    "gat edges, no loops": (
        lambda: pyg.GATConv(FEATURES, 8, heads=2, edge_dim=5, add_self_loops=False),
        ATTRIBUTES,
    ),
    "transformer": (lambda: pyg.TransformerConv(FEATURES, 8, heads=4), {}),
    "transformer beta": (
        lambda: pyg.TransformerConv(FEATURES, 8, heads=4, concat=False, beta=True),
        {},
    ),
    "transformer edges": (lambda: pyg.TransformerConv(FEATURES, 8, heads=4, edge_dim=5), ATTRIBUTES),
    "transformer no root": (lambda: pyg.TransformerConv(FEATURES, 8, root_weight=False), {}),
    "pna": (pna, {}),
    "pna towers": (lambda: pna("var", "sum", scalers=("linear", "inverse_linear"), towers=3), {}),
    "pna edges": (
        lambda: pna(towers=3, divide_input=True, edge_dim=5, train_norm=True),
        ATTRIBUTES,
    ),
    "pna deep": (lambda: pna(towers=2, pre_layers=2, post_layers=2, edge_dim=5), ATTRIBUTES),
    "pna deep elu": (lambda: pna(pre_layers=2, act="elu"), {}),
    "sage std": (lambda: pyg.SAGEConv(FEATURES, 10, aggr="std"), {}),
    "sage list": (lambda: pyg.SAGEConv(FEATURES, 10, aggr=["mean", "max", "std"]), {}),
    "sage sum of many": (
        lambda: pyg.SAGEConv(FEATURES, 10, aggr=pyg.MultiAggregation(["var", "max"], mode="sum")),
        {},
    ),
    "gine max": (
        lambda: pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5, train_eps=True, aggr="max"),
        ATTRIBUTES,
    ),
    "edge relu": (lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * FEATURES, 20), nn.ReLU())), {}),
    "edge sum": (lambda: pyg.EdgeConv(mlp(2 * FEATURES, 20), aggr="sum"), {}),
    "edge norm": (
        lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * FEATURES, 8), nn.BatchNorm1d(8), nn.ELU())),
        {},
    ),
    "gatv2 edges": (lambda: pyg.GATv2Conv(FEATURES, 8, heads=2, edge_dim=5, residual=True), ATTRIBUTES),
    "edge list": (lambda: pyg.EdgeConv(nn.Linear(2 * FEATURES, 6), aggr=["mean", "max"]), {}),
    "tag": (lambda: pyg.TAGConv(FEATURES, 10), {}),
    "cheb": (lambda: pyg.ChebConv(FEATURES, 10, 3), {}),
    "appnp": (lambda: pyg.APPNP(3, 0.1), {}),
    "arma": (lambda: pyg.ARMAConv(FEATURES, 10), {}),
    "edge": (lambda: pyg.EdgeConv(mlp(2 * FEATURES, 10)), {}),
    "rgcn": (lambda: pyg.RGCNConv(FEATURES, 10, 3), TYPES),
    "rgcn bases": (lambda: pyg.RGCNConv(FEATURES, 10, 3, num_bases=2, aggr="sum"), TYPES),
    "rgcn blocks": (
        lambda: pyg.RGCNConv(FEATURES, 10, 3, num_blocks=2, aggr="max", root_weight=False, bias=False),
        TYPES,
    ),
    "fast rgcn": (lambda: pyg.FastRGCNConv(FEATURES, 10, 3), TYPES),
    "gated": (lambda: pyg.GatedGraphConv(FEATURES, 2), {}),
}


def run(conv: nn.Module, x: Tensor, edge_index: Tensor, **arguments: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    output = conv(x, edge_index, **arguments)
    torch.manual_seed(1)
    leaves = [x, *(parameter for parameter in conv.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad((output * torch.randn_like(output)).sum(), leaves, allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def served(conv: nn.Module) -> int:
    """How many calls of the layer were ours."""
    own = vars(conv)
    return (own["propagate"] if "propagate" in own else own["forward"].propagate).served


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name: str, x: Tensor, edge_index: Tensor) -> None:
    make, arguments = LAYERS[name]
    conv = make()
    expected = run(conv, x, edge_index, **arguments)
    accelerate_for_cpu(conv, dtype="float32")
    assert explain(conv).replaced
    for ours, theirs in zip(run(conv, x, edge_index, **arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (served(conv) > 0) == (name != "arma")  # its nodes are not the first dimension
    restore(conv)
    assert "propagate" not in vars(conv)
    assert "forward" not in vars(conv)
    conv.eval()
    with torch.no_grad():
        stock = conv(x, edge_index, **arguments)
        accelerate_for_cpu(conv, dtype="float32")
        torch.testing.assert_close(conv(x, edge_index, **arguments), stock, rtol=1e-4, atol=1e-4)
        restore(conv)
        assert torch.equal(conv(x, edge_index, **arguments), stock)


def test_small_graphs_are_left_to_the_layer(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagate, "FEWEST_VALUES", EDGES * FEATURES + 1)
    conv = pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5)
    expected = conv(x, edge_index, **ATTRIBUTES)
    assert torch.equal(accelerate_for_cpu(conv)(x, edge_index, **ATTRIBUTES), expected)
    assert served(conv) == 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = pyg.SAGEConv(FEATURES, 32)
        self.second = pyg.GATConv(32, 8, heads=2, dropout=0.5)
        self.third = pyg.GCNConv(16, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.third(self.second(self.first(x, edge_index).relu(), edge_index).relu(), edge_index)


def losses(model: nn.Module, x: Tensor, edge_index: Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    labels, values = torch.arange(NODES) % 5, []
    model.second.dropout = 0.0  # its random numbers would be drawn in another order
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edge_index), labels)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def test_training_has_the_same_losses(x: Tensor, edge_index: Tensor) -> None:
    model = Net()
    expected = losses(copy.deepcopy(model), x, edge_index)
    accelerate_for_cpu(model)
    assert model.training
    assert losses(model, x, edge_index) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    model.eval()
    with torch.no_grad():
        ours = model(x, edge_index)
        torch.testing.assert_close(ours, restore(model)(x, edge_index), rtol=1e-4, atol=1e-4)


def test_dropout_of_attention(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.GATConv(FEATURES, 8, heads=2, dropout=0.5))
    torch.manual_seed(0)
    first = conv(x, edge_index)
    assert not torch.equal(first, conv(x, edge_index))
    outputs = torch.stack([conv(x, edge_index).detach() for _ in range(400)])
    torch.testing.assert_close(
        outputs.mean(0), restore(conv.eval())(x, edge_index).detach(), rtol=0.3, atol=0.3
    )


def test_the_plan_says_what_is_left_and_why() -> None:
    model = nn.ModuleDict(
        {
            "sage": pyg.SAGEConv(8, 8),
            "lstm": pyg.SAGEConv(8, 8, aggr="lstm", aggr_kwargs={"in_channels": 8, "out_channels": 8}),
            "skipped": pyg.GCNConv(8, 8),
        }
    )
    plan = explain(accelerate_for_cpu(model, skip_modules=("skipped",)))
    items = {item.name: item for item in plan.items}
    assert items["sage"].reason is None
    assert "sum, mean, min, max" in items["lstm"].reason
    assert items["skipped"].reason == "skip_modules"
    assert "sage" in str(plan)


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
    for served, edges in enumerate(
        (edge_index.int(), EdgeIndex(edge_index, sparse_size=(NODES, NODES)), in_rows), start=1
    ):
        torch.testing.assert_close(conv(x, edges), expected, rtol=1e-4, atol=1e-4)
        assert vars(conv)["propagate"].served == served
    ones = torch.ones(EDGES)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (NODES, NODES)).coalesce()
    graph = torch.sparse_csr_tensor(*_csr_parts(matrix), size=(NODES, NODES))
    stock = restore(copy.deepcopy(conv))
    torch.testing.assert_close(conv(x, graph), stock(x, graph))


def _csr_parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    csr = matrix.to_sparse_csr()
    return csr.crow_indices(), csr.col_indices(), csr.values()


def test_bfloat16_double_and_no_edges(x: Tensor, edge_index: Tensor) -> None:
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float64, 1e-10)):
        conv = pyg.GraphConv(FEATURES, 10).to(dtype)
        expected = conv(x.to(dtype), edge_index)
        output = accelerate_for_cpu(conv, dtype="float32")(x.to(dtype), edge_index)
        assert output.dtype is dtype
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    none = torch.zeros(2, 0, dtype=torch.long)
    for conv in (pyg.GCNConv(FEATURES, 4), pyg.GATConv(FEATURES, 4), pyg.SAGEConv(FEATURES, 4)):
        expected = conv(x, none)
        torch.testing.assert_close(accelerate_for_cpu(conv)(x, none), expected, rtol=1e-4, atol=1e-4)


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
        assert cache.get(inside, "source_to_target", NODES, NODES) is not cache.get(
            inside, "source_to_target", NODES, NODES
        )


def test_layers_of_a_model_share_the_graph(x: Tensor, edge_index: Tensor) -> None:
    adjacencies.clear()
    model = accelerate_for_cpu(pyg.GIN(FEATURES, 16, num_layers=3).eval(), dtype="float32")
    with torch.no_grad():
        model(x, edge_index)
    assert len(adjacencies) == 1


def test_networks_that_are_taken_apart_are_not_packed() -> None:
    conv = accelerate_for_cpu(pyg.EdgeConv(mlp(2 * FEATURES, 20)).eval(), dtype="float32")
    assert type(conv.nn) is nn.Sequential
    assert type(conv.nn[0]) is nn.Linear


class Hetero(nn.Module):
    """Two types of nodes and three of edges, in the two ways that PyTorch Geometric has for them."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [("a", "to", "b"), ("b", "back", "a"), ("a", "same", "a")]
        self.first = pyg.HeteroConv({kind: pyg.SAGEConv((FEATURES, FEATURES), 16) for kind in kinds})
        self.second = pyg.HGTConv(16, 16, (["a", "b"], kinds), heads=2)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        hidden = {name: part.relu() for name, part in self.first(x, edges).items()}
        return torch.cat(list(self.second(hidden, edges).values()))


def test_heterogeneous_graphs(edge_index: Tensor) -> None:
    model = Hetero()
    x = {"a": torch.randn(NODES, FEATURES), "b": torch.randn(NODES, FEATURES)}
    kinds = model.first.convs.keys()
    edges = {tuple(kind): edge_index[:, part::3] for part, kind in enumerate(kinds)}
    stock = copy.deepcopy(model)
    accelerate_for_cpu(model)
    results = []
    for net in (model, stock):
        output = net(x, edges)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        results.append(
            [
                output,
                *torch.autograd.grad((output * weights).sum(), list(net.parameters()), allow_unused=True),
            ]
        )
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert served(model.second) == 1
    assert all(served(conv) == 1 for conv in model.first.convs.values())


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"])
def test_whole_models(name: str, x: Tensor, edge_index: Tensor) -> None:
    options = {"aggregators": AGGREGATORS, "scalers": SCALERS, "deg": DEGREES} if name == "PNA" else {}
    model = getattr(pyg, name)(
        FEATURES, 16, num_layers=2, out_channels=5, norm="batch", jk="cat", **options
    ).eval()
    with torch.no_grad():
        expected = model(x, edge_index)
        accelerate_for_cpu(model, dtype="float32")
        torch.testing.assert_close(model(x, edge_index), expected, rtol=1e-4, atol=1e-4)
        assert all(served(conv) == 1 for conv in model.convs)
        assert torch.equal(restore(model)(x, edge_index), expected)


def test_transformers_of_graphs(x: Tensor, edge_index: Tensor) -> None:
    model = pyg.GPSConv(FEATURES, pyg.GINEConv(mlp(FEATURES, FEATURES), edge_dim=5), heads=2).eval()
    expected = model(x, edge_index, **ATTRIBUTES)
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(model(x, edge_index, **ATTRIBUTES), expected, rtol=1e-4, atol=1e-4)
    assert served(model.conv) == 1


class Scaled(pyg.MessagePassing):
    """Its messages are x_j while the factor is 1: only watching tells it from one that copies."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.factor


def test_messages_that_only_look_like_rows(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(Scaled())
    assert explain(conv).replaced[0].structure == "messages of its own, mean"
    with torch.no_grad():
        conv.factor.fill_(3.0)
        expected = restore(copy.deepcopy(conv))(x, edge_index)
        torch.testing.assert_close(conv(x, edge_index), expected, rtol=1e-4, atol=1e-4)


def test_hooks_and_explanations_go_to_the_layer(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.SAGEConv(FEATURES, 10))
    seen = []
    handle = conv.register_message_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    conv(x, edge_index)
    assert seen == [(EDGES, FEATURES)]
    handle.remove()
    conv(x, edge_index)
    assert len(seen) == 1
    assert vars(conv)["propagate"].served == 1


def test_copies_and_pickles(x: Tensor, edge_index: Tensor) -> None:
    model = accelerate_for_cpu(Net().eval(), dtype="float32")
    expected = model(x, edge_index)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert vars(other.first)["propagate"].conv is other.first
        torch.testing.assert_close(other(x, edge_index), expected)
        restore(other)
        torch.testing.assert_close(other(x, edge_index), expected, rtol=1e-4, atol=1e-4)
    assert "propagate" in vars(model.first)
