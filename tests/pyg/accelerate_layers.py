"""pytest plugin: PyTorch Geometric's own tests, with each layer accelerated when it is first called.

    PYTHONPATH=tests/pyg pytest -p accelerate_layers /path/to/pytorch_geometric/test/nn/conv      (`make test-pyg PYG_SOURCE=...`)

Tests must pass and fail as they do without it. How many calls were ours is said at the end: a suite that passes with none says nothing,
and fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph.propagate import FastPropagate

_served: list[FastPropagate] = []
_calls = {"layers": 0, "calls": 0}
_call = torch.nn.Module.__call__


def _accelerated_call(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    _calls["calls"] += 1
    if "_accelerated_by_tests" not in vars(conv) and not torch.compiler.is_compiling():
        vars(conv)["_accelerated_by_tests"] = True
        _calls["layers"] += 1
        state = (
            torch.get_rng_state()
        )  # checks of replaced modules draw numbers, which the test does not expect
        if all(parameter.device.type == "cpu" for parameter in conv.parameters()):
            accelerate_for_cpu(conv, dtype="float32", threads=torch.get_num_threads())
        torch.set_rng_state(state)
        if isinstance(propagate := vars(conv).get("propagate"), FastPropagate):
            _served.append(propagate)
    return _call(conv, *args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    MessagePassing.__call__ = _accelerated_call


def pytest_terminal_summary(terminalreporter: Any) -> None:
    served = sum(propagate.served for propagate in _served)
    terminalreporter.write_line(
        f"hf_cpu_accel: {_calls['layers']} layers, {len(_served)} of them accelerated; "
        f"{_calls['calls']} calls of layers, {served} aggregations accelerated"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not any(propagate.served for propagate in _served):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
