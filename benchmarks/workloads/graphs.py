"""Graph neural networks of two layers on a random graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.cli import random_models

NAMES = ("GCN", "SAGE", "GIN", "GAT", "GATv2")
_FEATURES = 128


@dataclass(frozen=True)
class GraphNetwork:
    """One of `NAMES`, as `benchmarks.gnn` has it, on a graph with so many nodes and edges."""

    name: str
    nodes: int
    edges: int

    def build(self) -> nn.Module:
        """The float32 eager model; the same weights in every process."""
        from benchmarks.gnn.cases import models

        return random_models.seeded(lambda: models()[self.name])

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Features of the nodes, float32 [nodes, 128], and edges, int64 [2, edges]; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(self.nodes, _FEATURES, generator=generator),
            "edge_index": torch.randint(0, self.nodes, (2, self.edges), generator=generator),
        }

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """[a row of every node [nodes, 40]], without gradients."""
        with torch.inference_mode():
            return [model(**inputs)]

    def real_tokens(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """All of them are."""
        return list(outputs)
