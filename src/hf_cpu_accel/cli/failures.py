"""Error messages that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def cannot_load(
    console: Console, model: object, error: OSError, *, random_config: bool = False
) -> typer.Exit:
    """Print why `model` cannot be loaded, and return the exception to raise.

    Args:
        console: prints the message.
        model: the MODEL of the command line.
        error: the OSError that transformers raises if it finds no such model.
        random_config: True if the command has the option `--random-config`.
    """
    console.print(f"Cannot load {model}: {error}", style="red", markup=False, highlight=False)
    instead = "a local folder or --random-config NAME" if random_config else "a local folder"
    console.print(f"Without a network, pass {instead}.")
    return typer.Exit(1)
