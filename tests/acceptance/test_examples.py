"""The examples run without a network."""

import sys

import pytest

from tests.acceptance.documents import ROOT
from tests.children import run_child


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("text_classification.py", ["--random-config", "--dtype", "float32"], "ms per text"),
        ("question_answering.py", ["--random-config"], "How long is the Rhine?"),
    ],
)
def test_examples_run_offline(example: str, arguments: list[str], expected: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    done = run_child(command, cpu_seconds=180)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
