"""What integrations/deploy starts is what the command line has. No container is built here, which needs a daemon."""

from __future__ import annotations

import json
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "integrations" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = (DEPLOY / "hf-cpu-accel.service").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["models"]


def of_the_image(instruction: str) -> list[str]:
    return json.loads(re.search(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])


@pytest.mark.parametrize(
    "words",
    [
        of_the_image("ENTRYPOINT") + of_the_image("CMD"),
        of_the_image("ENTRYPOINT") + COMPOSE["command"],
        re.search(r"^ExecStart=.*/(hf-cpu-accel .*)$", UNIT, re.MULTILINE)[1].split(),
    ],
    ids=["image", "compose", "systemd"],
)
def test_commands_have_their_options(words: list[str]) -> None:
    assert words[:2] == ["hf-cpu-accel", "serve"]
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    options = [word for word in words if word.startswith("--")]
    assert options
    assert all(option in told for option in options)


def test_the_image_copies_and_installs_existing_files() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    extras = re.search(r"whl\)\[([^\]]*)\]", DOCKERFILE)[1].split(",")
    assert set(extras) <= set(metadata("hf_cpu_accel").get_all("Provides-Extra"))


def test_a_stop_waits_longer_than_requests_may_run() -> None:
    grace = 60  # of `serve --grace`
    assert (
        f"default: {grace}.0" in CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    )
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > grace
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1]) > grace
