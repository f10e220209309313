"""The examples run without a network."""

import os
from pathlib import Path

import pytest

from tests.acceptance.documents import ROOT
from tests.programs import run_program


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("text_classification.py", ["--random-config", "--dtype", "float32"], "ms per text"),
        ("question_answering.py", ["--random-config"], "How long is the Rhine?"),
    ],
)
def test_examples_run_offline(tmp_path: Path, example: str, arguments: list[str], expected: str) -> None:
    path = str(ROOT / "examples" / example)
    source = (
        f"import runpy, sys; sys.argv = {[path, *arguments]!r}; runpy.run_path({path!r}, run_name='__main__')"
    )
    done = run_program(source, folder=tmp_path, environment=os.environ, cpu_seconds=180)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
