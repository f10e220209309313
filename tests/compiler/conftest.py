"""Models of one or two layers, and ways to compile them in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.fixture
def found(compiled: Callable[..., Any]) -> Callable[..., dict[str, int]]:
    """Runs a module compiled and as it is, compares, and gives {op of ours: calls}."""

    def run(module: nn.Module, *inputs: Tensor) -> dict[str, int]:
        with torch.no_grad():
            expected = module.eval()(*(input.clone() for input in inputs))
            torch.testing.assert_close(compiled(module)(*inputs), expected, atol=2e-5, rtol=1e-4)
        return {name.split(".")[1]: n for name, n in only_graph().ours.items()}

    return run


class Calls(nn.Module):
    """`function(module, *inputs)` as a module, with the parts that it needs."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def only_graph() -> GraphReport:
    """The report of the one graph that was compiled."""
    (graph,) = report.graphs()
    return graph


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))
