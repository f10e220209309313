"""Models of one or two layers, and ways to compile them in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_cpu_accel.compiler import report, torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from hf_cpu_accel.compiler.report import GraphReport


@pytest.fixture(autouse=True)
def _fresh_dynamo(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    torch._dynamo.reset()
    for name in ("hf_cpu_accel", "stats", "graph_break"):
        torch_private.counters(name).clear()
    report._graphs.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten graph runs as it is: for tests of what passes find."""
    monkeypatch.setattr(torch_private, "has_compiler", lambda: False)


@pytest.fixture
def compiled() -> Callable[..., Any]:
    """`compiled(model, **options)`: with sizes dynamic from the start, and no graph breaks."""

    def compile(model: nn.Module, **options: Any) -> Any:
        return torch.compile(
            model.eval(), backend=hf_cpu_accel, dynamic=True, fullgraph=True, options=options or None
        )

    return compile


def only_graph() -> GraphReport:
    """The report of the one graph that was compiled."""
    (graph,) = report.graphs()
    return graph
