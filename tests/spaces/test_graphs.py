"""The Space `graph-explorer` without its page, on a smaller graph."""

import sys

import pytest
import torch

from hf_cpu_accel import explain
from tests.spaces.folders import module_of

graphs = module_of("graph-explorer", "graphs")
sys.modules.setdefault(
    "graphs", graphs
)  # as app.py's folder is on the path, drawing.py finds it by this name
drawing = module_of("graph-explorer", "drawing")


@pytest.fixture(scope="module", params=graphs.NAMES)
def explorer(request):
    return graphs.explore(request.param, nodes=800)


def test_model_learns_and_both_models_agree(explorer):
    assert explorer.accuracy > 0.6
    eager, accelerated = (
        graphs.classify(model, explorer.data) for model in (explorer.pair.eager, explorer.pair.accelerated)
    )
    torch.testing.assert_close(accelerated, eager, rtol=1e-4, atol=1e-5)
    assert explain(explorer.pair.accelerated).replaced
    assert not explain(explorer.pair.eager).items


def test_graph_and_model_are_reproducible():
    state = torch.random.get_rng_state()
    first, second = (graphs.explore(graphs.KARATE, seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.accuracy == second.accuracy
    with pytest.raises(ValueError, match="Graph 'roads' does not exist"):
        graphs.explore("roads")


def test_communities_are_as_documented():
    data = graphs.communities(4000)
    source, target = data.edge_index
    same = (data.y[source] == data.y[target]).float().mean()
    assert abs(same - (0.4 + 0.6 / graphs.CLASSES)) < 0.02
    assert data.is_undirected()
    assert 17 < data.num_edges / data.num_nodes <= 20


def test_node_has_its_neighbors_and_its_classes(explorer):
    node = graphs.node_of(explorer, 5)
    source, target = explorer.data.edge_index
    expected = sorted(set(source[target == 5].tolist()))
    assert node.degree == len(expected)
    assert node.neighbors == expected[: graphs.MOST_NEIGHBORS]
    assert node.label == int(explorer.data.y[5])
    assert node.eager.sum() == pytest.approx(1)
    assert node.accelerated.argmax() == node.eager.argmax()


@pytest.mark.parametrize("number", [-1, 800, 2.5])
def test_missing_nodes_are_rejected(explorer, number):
    with pytest.raises(ValueError, match=f"Node {number} does not exist; enter a number from 0 to "):
        graphs.node_of(explorer, number)


def test_click_finds_the_node_that_is_drawn_there(explorer):
    node = graphs.node_of(explorer, 0)
    picture = drawing.draw(explorer, node)
    assert picture.shape == (drawing.SIZE, drawing.SIZE, 3)
    for number, (right, up) in drawing.places(node).items():
        x = drawing.SIZE * (right + 1.25) / 2.5
        y = drawing.SIZE * (1.25 - up) / 2.5
        assert drawing.node_at(node, x + 3, y - 2) == number
        # A few pixels beside its number, where the disc is.
        color = picture[int(y) + 9, int(x)] / 255
        expected = drawing._COLORS(int(explorer.data.y[number]))[:3]
        assert abs(color - expected).max() < 0.02


def test_edges_are_those_among_the_nodes(explorer):
    inside = set(drawing.edges_among(explorer, {0, 1, 2, 3}))
    edges = zip(*explorer.data.edge_index.tolist(), strict=True)
    assert inside == {edge for edge in edges if set(edge) <= {0, 1, 2, 3}}


def test_measures_a_pass_over_all_nodes(explorer):
    comparison = graphs.measure(explorer)
    assert (comparison.amount, comparison.unit) == (explorer.data.num_nodes, "nodes")
