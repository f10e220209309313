"""README and docs, and the blocks of code in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def title(document: Path) -> str:
    """Return the path of a document below `docs/`, or its name if it lies elsewhere, for test ids."""
    folder = ROOT / "docs"
    return str(document.relative_to(folder)) if document.is_relative_to(folder) else document.name


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" if it has none), the line of its fence from 1, and its text."""

    language: str
    line: int
    text: str


def blocks(document: Path) -> list[Block]:
    """All fenced blocks of a document."""
    found: list[Block] = []
    opening, lines = None, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif opening is None:
            opening, lines = (line[3:].strip(), number), []
        else:
            found.append(Block(*opening, "\n".join(lines)))
            opening = None
    assert opening is None, f"{document.name}: the block of line {opening} does not end"
    return found


def python_script(document: Path) -> str:
    """The Python of a document, each block on its own lines, so that an error names the line of the document."""
    lines: list[str] = []
    for block in blocks(document):
        if block.language == "python":
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    return "\n".join(lines)
