"""What several commands print when they cannot go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def cannot_load(console: Console, model: object, error: OSError) -> typer.Exit:
    """Say why, and give what to raise. OSError is what transformers raises when it finds no such model."""
    console.print(f"Cannot load {model}: {error}", style="red", markup=False, highlight=False)
    console.print("Without a network, pass a local folder or --random-config NAME.")
    return typer.Exit(1)
