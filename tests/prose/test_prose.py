"""The prose linter on small pages: each check finds its kind, and code is not read as prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose.__main__ import findings, tracked_files
from tests.prose.text import prose


def words(count: int) -> str:
    """Return so many different words."""
    return " ".join(f"word{number}" for number in range(count))


def checks(folder: Path, text: str, name: str = "page.md") -> list[tuple[int, str]]:
    """Return the line and the check of each finding in a page of this text."""
    page = folder / name
    page.write_text(text, encoding="utf-8")
    return sorted((line, message.split(":")[0]) for line, message in findings(page))


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("The limits are told elsewhere.", "style.vague"),
        ("See what became of it.", "style.vague"),
        ("It stands in for the cache.", "style.vague"),
        ("It computes with 32-bit floats.", "style.plain"),
        ("It writes 20 tokens per second.", "style.plain"),
        ("It runs; it returns; it ends.", "style.semicolons"),
        (words(26) + ".", "style.long_sentence"),
        ("It it runs.", "lexical_illusions"),
    ],
)
def test_findings(tmp_path: Path, text: str, check: str) -> None:
    assert checks(tmp_path, f"# Page\n\n{text}\n") == [(3, check)]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 'the limits are told'\n```",
        "Call `whatever_this is told` first.",
        words(24) + " `a code span of several words`.",
        "- " + "\n- ".join(["five words in an item"] * 6),
        "| a | b |\n|---|---|\n" + "| four words in cell | four words in cell |\n" * 4,
        "[A link](https://example.org/whatever).",
    ],
)
def test_no_findings(tmp_path: Path, text: str) -> None:
    assert checks(tmp_path, f"# Page\n\n{text}\n") == []


def test_docstrings_are_read_and_other_strings_are_not(tmp_path: Path) -> None:
    source = 'def f():\n    """Return\n    what became of it."""\n    return "nobody"\n'
    assert checks(tmp_path, source, "module.py") == [(3, "style.vague")]


def test_lines_stay_those_of_the_file() -> None:
    for path in tracked_files():
        assert prose(path).count("\n") == path.read_text(encoding="utf-8").rstrip("\n").count("\n") + (
            path.suffix == ".md"
        )


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a \.md or a \.py file"):
        prose(tmp_path / "page.rst") if (tmp_path / "page.rst").write_text("x") else None
