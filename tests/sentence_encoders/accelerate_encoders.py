"""pytest plugin: sentence-transformers' own tests of its models, with every model accelerated as soon as it is made.

    PYTHONPATH=tests/sentence_encoders pytest -p hub_stubs -p accelerate_encoders /path/to/sentence-transformers/tests/...
                                                                (`make test-sentence-transformers SENTENCE_TRANSFORMERS_SOURCE=...`)

Tests must pass and fail as they do without it. How many parts were replaced is said at the end: a suite that passes with none says
nothing, and fails.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

from hf_cpu_accel import accelerate_for_cpu, explain

os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")  # nothing that depends on the machine's speed

_counts = {"models": 0, "refused": 0, "parts": 0}
_reasons: dict[str, int] = {}


def _accelerate(model: torch.nn.Module) -> None:
    _counts["models"] += 1
    model.eval()  # some are made in training mode, and leave it when they are first asked
    state = torch.get_rng_state()  # a test counts on what was drawn before
    try:
        accelerate_for_cpu(model, dtype="float32", threads=torch.get_num_threads())
    except ValueError as error:
        _counts["refused"] += 1
        _reasons[str(error)] = _reasons.get(str(error), 0) + 1
    else:
        _counts["parts"] += len(explain(model).replaced)
    torch.set_rng_state(state)


def _accelerating(initialize: Any) -> Any:
    @functools.wraps(initialize)
    def wrapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        _accelerate(self)

    return wrapped


def pytest_configure(config: pytest.Config) -> None:
    for kind in (SentenceTransformer, CrossEncoder, SparseEncoder):
        kind.__init__ = _accelerating(kind.__init__)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"hf_cpu_accel: {_counts['models']} models, {_counts['refused']} refused, {_counts['parts']} parts replaced"
    )
    for reason, count in _reasons.items():
        terminalreporter.write_line(f"  refused {count} times: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not _counts["parts"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
