"""Functions in child processes: results, errors and crashes belong to names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.shards import Job


def repeat(name: str, times: int) -> str:
    """Return a name several times; raise or crash for some names."""
    if name == "raises":
        raise ValueError("a wrong name")
    if name == "crashes":
        os.abort()
    return name * times


def test_each_name_has_a_result_or_an_error(tmp_path: Path) -> None:
    job = Job("tests.test_shards:repeat", tmp_path / "new" / "results.jsonl", [2])
    job.run(["a", "raises", "crashes", "b"], shards=1)
    lines = job.lines()
    assert list(lines) == ["a", "raises", "crashes", "b"]
    assert lines["a"]["result"] == "aa"
    assert lines["b"]["result"] == "bb"
    assert lines["raises"]["error"] == "ValueError: a wrong name"
    assert lines["crashes"]["error"].startswith("the process ended with -6")
    assert not list(tmp_path.rglob("*.part"))


def test_a_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        Job("tests.no_such_module:repeat", tmp_path / "results.jsonl").run(["a"])


def test_the_last_line_of_a_name_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"name": "a", "result": 1}\n{"name": "a", "result": 2}\n{"name": "b", "resu')
    assert Job("any:function", file).lines() == {"a": {"name": "a", "result": 2}}
