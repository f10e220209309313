"""Reports of the graphs that were compiled in this process."""

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
    nodes: the number of nodes of Dynamo's graph.
    rewrites: {pass: number of matches}.
    ours: {op of this package: calls} in the compiled graph.
    rest: {other op: calls}, for which Inductor generates code.
    left: why Inductor compiles the graph alone, or the graph runs uncompiled; None if it was rewritten and compiled.
    cpu_seconds: the CPU time of compiling in this process and its threads.
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
    """Return the reports of the last 256 graphs, the oldest first."""
    return list(_graphs)


@cache
def say(message: str) -> None:
    """Log a warning once per process, since every graph would repeat it."""
    _logger.warning("hf_cpu_accel: %s", message)
