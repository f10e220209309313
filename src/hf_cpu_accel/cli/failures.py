"""What several commands print when they cannot go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def cannot_load(
    console: Console, model: object, error: OSError, *, random_config: bool = False
) -> typer.Exit:
    """Say why, and give what to raise. OSError is what transformers raises when it finds no such model.

    Args:
        random_config: whether the command has this option.
    """
    console.print(f"Cannot load {model}: {error}", style="red", markup=False, highlight=False)
    instead = "a local folder or --random-config NAME" if random_config else "a local folder"
    console.print(f"Without a network, pass {instead}.")
    return typer.Exit(1)
