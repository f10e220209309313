"""The folder of this package, and reading of small text files of the kernel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder of this package."""


def read_text(path: Path) -> str | None:
    """Return the file's text without surrounding blanks; ``None`` if it is absent, unreadable or not text."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
