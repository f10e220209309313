"""`Model`: how one model of a suite is built and called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

Inputs = Callable[[int, Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        family: The group whose geometric mean is reported.
        inputs: makes the arguments of the forward for a batch.
        by_name: whether the forward is given them by name; else in their order.
    """

    family: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    by_name: bool = True


def noise(**shapes: tuple[int, ...]) -> Inputs:
    """Return a function that makes normal noise [batch, *shape] for each argument."""
    return lambda batch, generator: {
        name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()
    }


def image(size: int = 224) -> Inputs:
    return noise(pixel_values=(3, size, size))


def token_ids(vocabulary: int, *names: str, length: int = 128) -> Inputs:
    """Return a function that makes int64 [batch, length] for each argument."""
    # The first few stand for padding and the ends of texts.
    return lambda batch, generator: {
        name: torch.randint(10, vocabulary, (batch, length), generator=generator) for name in names
    }
