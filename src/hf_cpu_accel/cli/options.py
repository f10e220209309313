"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[str | None, typer.Argument(help="Model id, local folder or GGUF file.", show_default=False)]


def random_config(help: str = "Instead of MODEL, offline: a well-known shape, random weights.") -> Any:
    """The option that takes the place of `Model` without a network; for `str | None`."""
    return typer.Option(help=help, show_default=False)


def accuracy() -> Any:
    """What chooses the dtypes in place of `--dtype`; for `float | None`."""
    help = (
        "Instead of --dtype: least cosine to eager's outputs, or perplexity kept, on built-in examples; 0.99."
    )
    return typer.Option(help=help, show_default=False)


def threads(help: str = "Threads for every system [default: what doctor says].") -> Any:
    """How many threads the command may take; for `int | None`, of which None leaves it to `apply_threads`."""
    return typer.Option(min=1, help=help)
