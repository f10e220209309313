"""pytest plugin: diffusers' own tests of pipelines, with every pipeline accelerated as soon as it has its models.

    PYTHONPATH=tests/diffusion pytest -p hub_stubs -p accelerate_pipelines /path/to/diffusers/tests/pipelines/flux
                                                                                       (`make test-diffusers DIFFUSERS_SOURCE=...`)

Tests must pass and fail as they do without it. How many parts were replaced is said at the end: a suite that passes with none says
nothing, and fails.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline  # the installed one: in a checkout, tests would take its own

from hf_cpu_accel import accelerate_for_cpu, explain

os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")  # nothing that depends on the machine's speed

# Tests that fail for a reason: what is refused.
REFUSED = {
    "test_to_dtype": "an accelerated pipeline is not cast to float16, which the kernels do not compute in",
}

_counts = {"pipelines": 0, "refused": 0, "parts": 0}
_reasons: dict[str, int] = {}
_register = DiffusionPipeline.register_modules


def _register_and_accelerate(pipe: DiffusionPipeline, **modules: Any) -> None:
    _register(pipe, **modules)
    _counts["pipelines"] += 1
    for component in modules.values():
        if isinstance(component, torch.nn.Module):
            component.eval()  # the tests build models in training mode, and none drops anything
    state = torch.get_rng_state()  # a test counts on what was drawn before
    try:
        accelerate_for_cpu(pipe, dtype="float32", threads=torch.get_num_threads())
    except ValueError as error:
        _counts["refused"] += 1
        _reasons[str(error)] = _reasons.get(str(error), 0) + 1
    else:
        _counts["parts"] += len(explain(pipe).replaced)
    torch.set_rng_state(state)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := REFUSED.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.xfail(raises=RuntimeError, reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    DiffusionPipeline.register_modules = _register_and_accelerate


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"hf_cpu_accel: {_counts['pipelines']} pipelines, {_counts['refused']} refused, {_counts['parts']} parts replaced"
    )
    for reason, count in _reasons.items():
        terminalreporter.write_line(f"  refused {count} times: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not _counts["parts"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
