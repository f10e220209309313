"""What became of each graph that was compiled in this process."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache

from torch.fx import Graph

_logger = logging.getLogger("hf_cpu_accel.compiler")


@dataclass
class GraphReport:
    """Attributes:
    nodes: of Dynamo's graph.
    rewrites: {pass: how often it matched}.
    ours: {op of ours: calls} in the graph that was compiled.
    rest: {other op: calls}, which Inductor generates code for.
    left: why the graph is Inductor's alone, or runs without it; None if it was rewritten and compiled.
    cpu_seconds: of this process and its threads, for compiling.
    """

    nodes: int
    rewrites: dict[str, int] = field(default_factory=dict)
    ours: dict[str, int] = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)
    left: str | None = None
    cpu_seconds: float = 0.0

    def record(self, graph: Graph) -> None:
        """Count the ops of the rewritten graph."""
        names = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
        self.ours = {name: n for name, n in names.items() if name.startswith("hf_cpu_accel.")}
        self.rest = {name: n for name, n in names.items() if name not in self.ours}


_graphs: deque[GraphReport] = deque(maxlen=256)


def add(report: GraphReport) -> None:
    _graphs.append(report)


def graphs() -> list[GraphReport]:
    """Of the last 256 graphs, the oldest first."""
    return list(_graphs)


@cache
def say(message: str) -> None:
    """A line in the log, once per process: every graph would repeat it."""
    _logger.warning("hf_cpu_accel: %s", message)
