"""Print the findings; see the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import proselint.checks
from proselint.registry.checks import Check

from tests.prose.style import FROM_PROSELINT, FROM_PROSELINT_FOR_PAGES, PHRASES, SENTENCES
from tests.prose.text import prose

ROOT = Path(__file__).parents[2]
# Generated, or a record of what was measured.
EXEMPT = ("docs/reference/models.md", "docs/reference/tasks.md", "benchmarks/", "CODE_OF_CONDUCT.md")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the message of each finding in a file."""
    text = prose(path)
    sentences = SENTENCES if path.suffix == ".md" else ()
    for check in (*PHRASES, *sentences, *_proselint_checks(path)):
        for result in check.check_with_flags(text):
            yield text.count("\n", 0, result.span[0]) + 1, f"{result.check_path}: {result.message}"


def tracked_files() -> list[Path]:
    """Return the pages, and the modules whose docstrings are read."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "src/*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return [ROOT / name for name in listed if not name.startswith(EXEMPT)]


def _proselint_checks(path: Path) -> list[Check]:
    names = (*FROM_PROSELINT, *(FROM_PROSELINT_FOR_PAGES if path.suffix == ".md" else ()))
    return [
        check for check in proselint.checks.__register__ if any(check.matches_partial(name) for name in names)
    ]


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    count = 0
    for path in [Path(name).resolve() for name in arguments] or tracked_files():
        for line, message in sorted(set(findings(path))):
            count += 1
            print(f"{path.relative_to(ROOT)}:{line}: {message}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
