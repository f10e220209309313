"""The agreement of two systems' outputs: the worst cosine of a row and the largest relative error, in float64.

One cosine over a flattened tensor would hide a few wrong rows and a wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """The agreement of outputs with a reference.

    Attributes:
        worst_cosine: the smallest cosine similarity of any row (a vector along the last dimension).
        max_relative_error: max |output - reference| / max |reference|, the largest over all output tensors.
    """

    worst_cosine: float
    max_relative_error: float


def float_tensors(output: object) -> list[Tensor]:
    """Return the floating-point tensors of a model output, in order; sequences and mappings may be nested."""
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in float_tensors(part)]
    return []


def compare(output: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Compare two lists of output tensors of equal shapes, in any float dtype.

    A non-finite value in `output` gives cosine -1 and an infinite error.

    Raises:
        ValueError: the lists differ in length or shapes or are empty, or the reference is not finite.
    """
    if not reference or [tuple(t.shape) for t in output] != [tuple(t.shape) for t in reference]:
        raise ValueError(
            f"cannot compare outputs of shapes {[tuple(t.shape) for t in output]} with a reference of shapes "
            f"{[tuple(t.shape) for t in reference]}; pass the outputs of the same call of the same model"
        )
    pairs = [_compare_one(ours, truth) for ours, truth in zip(output, reference, strict=True)]
    return Agreement(min(p.worst_cosine for p in pairs), max(p.max_relative_error for p in pairs))


def _compare_one(output: Tensor, reference: Tensor) -> Agreement:
    ours, truth = output.double(), reference.double()
    if ours.numel() == 0:
        return Agreement(1.0, 0.0)
    if not bool(torch.isfinite(truth).all()):
        raise ValueError(
            "the reference output holds NaN or infinity; use an input for which the reference is finite"
        )
    if not bool(torch.isfinite(ours).all()):
        return Agreement(-1.0, math.inf)
    width = ours.shape[-1] if ours.ndim else 1
    rows, true_rows = ours.reshape(-1, width), truth.reshape(-1, width)
    product = rows.norm(dim=1) * true_rows.norm(dim=1)
    # Two zero rows agree; a zero row against a non-zero one does not.
    same_zero = (rows.norm(dim=1) == 0) & (true_rows.norm(dim=1) == 0)
    cosine = torch.where(same_zero, 1.0, (rows * true_rows).sum(1) / product.clamp_min(1e-300))
    scale = max(float(truth.abs().max()), 1e-300)
    return Agreement(min(1.0, float(cosine.min())), float((ours - truth).abs().max()) / scale)
