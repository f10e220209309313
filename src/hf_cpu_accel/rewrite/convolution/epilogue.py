"""What may follow a convolution in the same call: a batch norm, a residual, an activation."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Epilogue(NamedTuple):
    """activation(norm(convolution) + residual), with the parts that are there.

    Attributes:
        normalised: whether the convolution's norm is applied.
        activation: one of `ops.linear.ACTIVATIONS`.
    """

    normalised: bool = False
    residual: Tensor | None = None
    activation: str = "none"


PLAIN = Epilogue()
NORMALISED = Epilogue(normalised=True)
