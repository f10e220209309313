"""`hf-cpu-accel compile`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app
from hf_cpu_accel.compiler.background import jobs


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["compile", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_fused_model_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    output = run("--random-config", "bert-tiny", "--seq", "8", "--threads", "1")
    assert "compile now: nothing, its 2 layers already run as one op each" in output


def test_modules_that_are_left_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "compile_here", lambda job: ("failed", "it cannot be traced", 1.5))
    output = run("--random-config", "bert-tiny", "--seq", "8", "--threads", "1", "--alone", "--report")
    row = next(line.split() for line in output.splitlines() if line.startswith("encoder.layer.* "))
    assert row == [
        "encoder.layer.*",
        "2",
        "level",
        "1",
        "-",
        "0",
        "0",
        "1.5",
        *["it", "cannot", "be", "traced"],
    ]
    assert "0 recompiles" in output
    assert "no graph" in output


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "pass either MODEL"), (("--random-config", "gpt5"), "is unknown")]
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["compile", *arguments])
    assert result.exit_code == 2
    assert message in result.output
