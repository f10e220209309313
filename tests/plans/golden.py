"""The golden files: blocks of lines, one block per model, with an empty line between them."""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.plans.rows import expand, lines

FOLDER = Path(__file__).with_name("golden")
_PACKAGES = ("torch", "transformers", "diffusers", "torch-geometric")

Blocks = dict[str, str]
"""{name of a model: its block}."""


def versions() -> str:
    """Return the versions of the packages that the models come from."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def read(group: str, folder: Path = FOLDER) -> tuple[str, Blocks]:
    """Return the versions that a golden file was made with, and its blocks; ("", {}) if there is no file."""
    file = folder / f"{group}.txt"
    if not file.exists():
        return "", {}
    head, *blocks = file.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    return head.removeprefix("# "), {block.partition(":")[0]: block for block in blocks}


def write(group: str, blocks: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write a golden file, with the blocks sorted by name."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"# {versions()}", *(blocks[name] for name in sorted(blocks))]
    (folder / f"{group}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def block(name: str, inspection: Mapping[str, Any]) -> str:
    """Return the block of a model from what `subjects.inspect` returns."""
    errors = [f"{dtype}: raises {error}" for dtype, error in inspection["errors"].items()]
    title = f"{name}: {inspection['title']}"
    return "\n".join((title, *(f"  {line}" for line in (*errors, *lines(inspection["rows"])))))


def difference(name: str, before: str | None, after: str | None) -> list[str]:
    """Return the unified diff of the rows of two blocks; empty if they are equal. None stands for a block that does not exist."""
    texts = [_rows(text) for text in (before, after)]
    return list(difflib.unified_diff(*texts, f"golden/{name}", f"now/{name}", lineterm="", n=1))


def _rows(text: str | None) -> list[str]:
    if text is None:
        return []
    title, *rows = text.splitlines()
    return [title, *(f"  {row}" for row in expand(row.removeprefix("  ") for row in rows))]
