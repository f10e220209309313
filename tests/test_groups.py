"""Tests that share what takes long to make are dealt out to one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.children import run_child
from tests.groups import GROUPS, group_of

TESTS = Path(__file__).parent


def test_what_is_named_is_there() -> None:
    assert all((TESTS / name).exists() for members in GROUPS.values() for name in members)


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/compiler/passes/test_norm.py::test_a[1::2/x]", "compiling"),
        ("tests/compiler/test_caches.py::test_a", "programs"),
        ("tests/rewrite/tensor_parallel/test_two_processes.py::test_a", "programs"),
        ("tests/test_plan.py::test_a", "tests/test_plan.py"),
        ("integrations/cpp/test_runner.py::test_a", "integrations/cpp/test_runner.py"),
    ],
)
def test_groups_are_of_files(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


CONFTEST = """
from tests.groups import Groups

def pytest_xdist_make_scheduler(config, log):
    return Groups(config, log)
"""
TEST = """
import os, pathlib, pytest, time

@pytest.mark.parametrize("number", range(6))
def test(number):
    time.sleep(0.02)
    name = pathlib.Path(__file__).stem + "." + os.environ["PYTEST_XDIST_WORKER"]
    (pathlib.Path(__file__).parent / name).touch()
"""


def test_a_file_stays_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_one", "test_two", "test_three"):
        (tmp_path / f"{name}.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "--rootdir", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = run_child(command, cwd=tmp_path, env=environment)
    assert "18 passed" in done.stdout, done.stdout + done.stderr
    found = sorted(path.name.partition(".")[0] for path in tmp_path.glob("*.gw*"))
    assert found == ["test_one", "test_three", "test_two"]
