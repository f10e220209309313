"""How far decoder_layers may be from its plain-torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.decoder.cases import Case

# Largest difference over the largest value of the reference; see encoder/test_layer.py.
BOUNDS = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "int8": 3e-2,
    "int8-weight": 1e-2,
    "int4": 5e-2,
    "affine8": 1e-2,
    "affine4": 1e-2,
}
BFLOAT16_ROUNDING = 2.0**-8
INT8_STEP = 1 / 127


def bound_of(case: Case) -> float:
    bound = BOUNDS[case.weights]
    # A step of 8 bits may be taken the other way, where the values before it differ in their last bits.
    return (
        bound
        + BFLOAT16_ROUNDING * (torch.bfloat16 in (case.dtype, case.cache))
        + INT8_STEP * (case.cache is torch.int8)
    )


def close(actual: Tensor, expected: Tensor, bound: float, what: str, where: Tensor | None = None) -> None:
    """Of caches, only what the call wrote: padding and the storage behind the tokens hold anything."""
    if where is not None:
        where = where & ~torch.isnan(actual) & ~torch.isnan(expected)
        actual, expected = actual[where], expected[where]
    if expected.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().amax() / expected.double().abs().amax().clamp(
        min=1e-3
    )
    assert error <= bound, f"{what}: {error:.2e} > {bound:.2e}"
