"""Every example runs offline, with random weights, and prints its table."""

import os
from pathlib import Path

import pytest

from tests.acceptance.documents import ROOT
from tests.programs import run_program

EXAMPLES = {
    "accuracy_budget.py": "speedup  weights",
    "chat.py": "tokens equal",
    "embeddings.py": "least cosine of an embedding",
    "image_generation.py": "pixels differ by",
    "node_classification.py": "accuracy",
    "speech_recognition.py": "of the letters equal",
    "text_classification.py": "3 of 3 labels equal",
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_offline(tmp_path: Path, example: str) -> None:
    path = str(ROOT / "examples" / example)
    source = f"import runpy, sys; sys.argv = [{path!r}, '--random-config']; runpy.run_path({path!r}, run_name='__main__')"
    done = run_program(source, folder=tmp_path, environment=os.environ, cpu_seconds=180)
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[example] in done.stdout
    assert "speedup" in done.stdout
