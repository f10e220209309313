"""A model that is not there: what is proposed instead is something that the command takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app

COMMANDS = {
    "serve": [],
    "pack": ["packed"],
    "quantize": ["--report"],
    "bench": ["--task", "text-classification"],
    "chat": [],
    "export": ["--aot", "model.pt2"],
    "report": [],
}
RANDOM = {"bench", "chat", "export", "report"}


@pytest.mark.parametrize("command", COMMANDS)
def test_failures_name_the_options_of_the_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "200"})
    options = runner.invoke(app, [command, "--help"]).output
    assert ("--random-config" in options) == (command in RANDOM)
    said = runner.invoke(app, [command, str(tmp_path / "nowhere"), *COMMANDS[command]])
    assert said.exit_code == 1, said.output
    assert "Without a network, pass a local folder" in said.output
    assert ("--random-config" in said.output) == (command in RANDOM)
