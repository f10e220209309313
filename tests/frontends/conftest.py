"""Makes `pyg_layers.py` importable for the tests of this folder, and gives those of PyTorch Geometric a graph."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def small_graphs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as small as those of these tests would be left to some of the layers."""
    monkeypatch.setattr("hf_cpu_accel.graph.propagate.FEWEST_VALUES", 0)


@pytest.fixture
def edge_index() -> Tensor:
    """Unsorted, with self-loops, with pairs that come twice, and with nodes without edges."""
    from pyg_layers import EDGES, NODES

    edges = torch.randint(0, NODES - 5, (2, EDGES))
    edges[:, :8] = edges[0, :8]
    edges[:, 20:30] = edges[:, 40:50]
    return edges


@pytest.fixture
def x() -> Tensor:
    from pyg_layers import FEATURES, NODES

    return torch.randn(NODES, FEATURES)
