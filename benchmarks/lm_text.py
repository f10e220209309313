"""Text that ships with Python, to train and to evaluate a small language model without a download.

The standard library's sources, the reference topics of pydoc and the licence. Which of it is held out depends on the names
alone, so a model trained on one machine is measured on text that it has not seen on any other of the same Python version.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Tables of characters, and the tests: neither is language.
_LEFT_OUT = {"encodings", "lib2to3", "site-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Whole documents, in an order that is always the same."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def corpus(folder: Path | None = None) -> Corpus:
    """Return the documents below `folder`, by default the running Python's standard library, and pydoc's topics."""
    train, held_out = [], []
    # By digest: neighbours in the alphabet resemble each other.
    for digest, text in sorted((_digest(name), text) for name, text in _documents(folder)):
        (held_out if digest < _HELD_OUT_SHARE else train).append(text)
    if not train or not held_out:
        raise ValueError(f"folder={folder}: too few .py files to split into training and held-out text")
    return Corpus(tuple(train), tuple(held_out))


def _documents(folder: Path | None) -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not _LEFT_OUT & set(name.parts) and name.parts[0] != "pydoc_data":
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="ignore")
    if folder is None:
        from pydoc_data.topics import topics

        yield from ((f"topic {name}", text) for name, text in topics.items())
        licence = library / "LICENSE.txt"
        if licence.exists():
            yield "licence", licence.read_text(encoding="utf-8", errors="ignore")


def _digest(name: str) -> float:
    """Return a number in [0, 1) from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
