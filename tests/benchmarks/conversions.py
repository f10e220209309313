"""What conversions do in a process of their own, which imports nothing for it."""

from pathlib import Path


def write_once(case: Path, folder: Path) -> None:
    (folder / "model.xml").write_text("made")
    (case / "count").write_text((case / "count").read_text() + "x")


def fail(case: Path, folder: Path) -> None:
    raise RuntimeError("unsupported operator")
