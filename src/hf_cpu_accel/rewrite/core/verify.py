"""Compare the output of a replacement with the output of the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.tolerance import FEW_ROWS, MOST_ROWS, OTHER_ROWS, PACKED, ROW_SUMS, SMALL_ROW

_BATCH, _TOKENS = 2, 3

DISAGREES = "its replacement differs by"  # prefix of the reasons of `disagreement`


def probe(features: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Return a random input [2, 3, features], the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_BATCH, _TOKENS, features, generator=generator).to(dtype)


def row_error(candidate: object, reference: object) -> float:
    """Return the largest relative error over the rows (last dimension) of two tensors.

    It is inf if one of them is not a tensor, if shapes differ, or if one has NaN.
    """
    if not isinstance(candidate, Tensor) or not isinstance(reference, Tensor):
        return float("inf")
    if candidate.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    worst = row_errors(candidate, reference).max().item()
    return worst if worst == worst else float("inf")


def row_errors(candidate: Tensor, reference: Tensor) -> Tensor:
    """Return the relative error of each row, float64; NaN where one of the two has NaN."""
    expected = reference.double()
    norms = expected.norm(dim=-1)
    floor = (norms.max() * SMALL_ROW).clamp_min(1e-12)
    return (candidate.double() - expected).norm(dim=-1) / torch.maximum(norms, floor)


def are_probabilities(value: Tensor) -> bool:
    """Return whether `value` is attention weights [B, heads, L, keys], which some layers return without being asked and callers
    ignore."""
    sums = value.float().sum(dim=-1)
    return value.dim() == 4 and ROW_SUMS.holds(sums, torch.ones_like(sums))


def surely_within(
    candidate: Tensor, reference: Tensor, allowed: float, *, rows: Tensor | None = None
) -> bool:
    """Return whether every row's error is below `allowed`, in few ops and without float64.

    False decides nothing: a row may be near the bound or beyond it, or values so large (or missing) that only `row_errors` can
    tell.

    Args:
        candidate, reference: floating point [..., N], of the same shape and not empty.
        allowed: as for `row_error`.
        rows: bool [...], the rows that count, or None for all.
    """
    expected = reference.float()
    norms = torch.linalg.vector_norm(expected, dim=-1)
    largest = norms.max().item()
    if not 1e-6 < largest < 1e16:  # squares of float32 in both directions; NaN
        return False
    distances = torch.linalg.vector_norm(candidate.float() - expected, dim=-1)
    within = distances <= norms.clamp_min(largest * SMALL_ROW) * (0.99 * allowed)
    if rows is not None:
        within = within | ~rows
    return bool(within.all())


def computes_alike(candidate: object, reference: object, tolerance: float, *, quantizes: bool) -> bool:
    """Return whether two computations with the same packed weights agree up to rounding: `row_error` within `tolerance`.

    Args:
        quantizes: whether they quantize intermediate values. A value between two steps may round either way, which moves a few
            rows by more than rounding does. Three of four rows must be within a tenth of the tolerance.
    """
    error = row_error(candidate, reference)
    if error <= tolerance or not quantizes:
        return error <= tolerance
    if not isinstance(candidate, Tensor) or not isinstance(reference, Tensor) or error > FEW_ROWS * tolerance:
        return False
    return bool(row_errors(candidate, reference).quantile(MOST_ROWS) <= OTHER_ROWS * tolerance)


def tolerance(dtype: str, compute: torch.dtype) -> float:
    """Return the bound of `row_error` for a weight packed as `dtype` in a model that computes in `compute`."""
    rounding = PACKED.bfloat16 if compute is torch.bfloat16 else 0.0
    return max(PACKED.of(dtype), rounding)


def disagreement(candidate: object, reference: object, dtype: str, compute: torch.dtype) -> str | None:
    """Return None if the two agree, else a reason for the plan."""
    return beyond(tolerance(dtype, compute), candidate, reference)


def beyond(allowed: float, candidate: object, reference: object) -> str | None:
    """Return None if `row_error` of the two is within `allowed`, else a reason for the plan."""
    error = row_error(candidate, reference)
    if error <= allowed:
        return None
    return f"{DISAGREES} {error:.1e} (relative, worst row; allowed {allowed:.0e})"


def run(module: nn.Module, *inputs: Tensor) -> Any:
    """Return `module.forward(*inputs)` without gradients; a lazy output is computed, so that errors show now."""
    with torch.no_grad():
        output = module.forward(*inputs)
        return output.tensor if isinstance(output, LazyTensor) else output


def run_alone(module: nn.Module, *inputs: Tensor) -> Tensor | None:
    """Return `run(module, *inputs)`, or None if the module raises or returns no tensor."""
    output = call_foreign(run, module, *inputs)
    return output if isinstance(output, Tensor) else None
