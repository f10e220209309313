"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[str | None, typer.Argument(help="Model id, local folder or GGUF file.", show_default=False)]


def dtype() -> Any:
    """Return the option `--dtype`, for `str`."""
    return typer.Option(
        help="dtype of the packed weights: auto, float32, bfloat16, int8, int8-weight or int4."
    )


def random_config(
    help: str = "Use a well-known architecture with random weights instead of MODEL; no network.",
) -> Any:
    """Return the option `--random-config`, which replaces `Model` without a network, for `str | None`."""
    return typer.Option(help=help, show_default=False)


def accuracy() -> Any:
    """Return the option `--accuracy`, which chooses the dtypes instead of `--dtype`, for `float | None`."""
    help = (
        "Choose the dtype of each layer instead of --dtype: the lowest accepted cosine to the outputs of PyTorch "
        "(eager) on built-in examples, or eager perplexity / perplexity for language models. Example: 0.99."
    )
    return typer.Option(help=help, show_default=False)


def threads(help: str = "Number of threads [default: chosen for the machine; see doctor].") -> Any:
    """Return the option `--threads`, for `int | None`; with None `apply_threads` chooses the number."""
    return typer.Option(min=1, help=help)
