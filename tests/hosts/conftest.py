"""A graph for the tests of PyTorch Geometric."""

import pytest
import torch
from torch import Tensor

from tests.hosts.pyg_layers import EDGES, FEATURES, NODES


@pytest.fixture
def small_graphs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as small as those of these tests would be left to some of the layers."""
    monkeypatch.setattr("hf_cpu_accel.graph.propagate.FEWEST_VALUES", 0)


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
