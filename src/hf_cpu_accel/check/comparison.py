"""One comparison of outputs with a reference, for decisions and for reports.

A row is a vector along one dimension, by default the last one. Its error is its distance from the row of the reference, relative
to the length of that row. A row near 0 has no direction, so its error is relative to a share of the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.tolerance import MOST_ROWS, OTHER_ROWS, SMALL_ROW, Closeness, Tolerance

DISAGREES = "its replacement differs by"  # prefix of the reasons of `Comparison.reason`

_Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Agreement:
    """The agreement of outputs with a reference.

    Attributes:
        worst_cosine: the smallest cosine similarity of any row (a vector along the last dimension).
        max_relative_error: max |output - reference| / max |reference|, the largest over all output tensors.
    """

    worst_cosine: float
    max_relative_error: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """The difference between an output and its reference. Errors are computed when they are read.

    Attributes:
        pairs: (output, reference), floating-point tensors [..., N] of equal shapes.
        mismatch: the first difference in structure, shapes, dtypes or exact values, such as "of shape (2, 3) instead of (3, 2)";
            None if there is none.
        rows: bool [...], the rows that count, if there is one pair; None for all.
    """

    pairs: tuple[_Pair, ...]
    mismatch: str | None = None
    rows: Tensor | None = None

    @cached_property
    def errors(self) -> tuple[Tensor, ...]:
        """The errors of the rows of each pair, float64; NaN where one of the two has NaN."""
        errors = (_row_errors(*pair) for pair in self.pairs)
        return tuple(e if self.rows is None else e[self.rows] for e in errors)

    @property
    def worst(self) -> float:
        """The largest error of a row; inf for a mismatch or NaN, 0 without rows."""
        if self.mismatch is not None:
            return math.inf
        return max(map(_largest, self.errors), default=0.0)

    @property
    def most(self) -> float:
        """The largest error of most rows (`MOST_ROWS`) of each pair; inf for a mismatch, NaN or an infinite error."""
        worst = self.worst
        if not 0.0 < worst < math.inf:
            return worst
        return max(map(_largest_of_most, self.errors))

    @property
    def agreement(self) -> Agreement:
        """The numbers for reports, in float64. A non-finite value of the output gives cosine -1 and an infinite error.

        Raises:
            ValueError: there is a mismatch or no floating-point tensor, or the reference is not finite.
        """
        if self.mismatch is not None or not self.pairs:
            difference = self.mismatch or "without floating-point tensors"
            raise ValueError(
                f"cannot compare an output {difference}; pass the outputs of the same call of the same model"
            )
        parts = [_agreement(*pair) for pair in self.pairs]
        return Agreement(min(p.worst_cosine for p in parts), max(p.max_relative_error for p in parts))

    def within(self, bound: float | Tolerance | Closeness, *, few: float = 1.0) -> bool:
        """Return whether the output agrees with the reference.

        Args:
            bound: of the errors of rows (a number, or by the dtype of the reference), or of single values.
            few: how many bounds a few rows may be off. If it is more than 1, most rows (`MOST_ROWS`) must be within `OTHER_ROWS`
                bounds.
        """
        if self.mismatch is not None:
            return False
        return all(self._is_within(number, bound, few) for number in range(len(self.pairs)))

    def text(self, bound: float) -> str:
        """Return the worst error and its bound, for a message."""
        return f"{self.worst:.1e} (relative, worst row; allowed {bound:.0e})"

    def reason(self, bound: float) -> str | None:
        """Return None if the output agrees with the reference, else the reason for the plan."""
        return None if self.within(bound) else f"{DISAGREES} {self.text(bound)}"

    def where_finite(self) -> Comparison:
        """Return the comparison with 0 for values that are not finite in the reference, such as masked scores."""
        pairs = ((*pair, pair[1].isfinite()) for pair in self.pairs)
        return replace(
            self, pairs=tuple((a.where(finite, 0.0), b.where(finite, 0.0)) for a, b, finite in pairs)
        )

    def _is_within(self, number: int, bound: float | Tolerance | Closeness, few: float) -> bool:
        output, reference = self.pairs[number]
        if isinstance(bound, Closeness):
            same_dtype = output.dtype is reference.dtype
            return same_dtype and torch.allclose(output, reference, bound.relative, bound.absolute)
        allowed = bound.of(reference.dtype) if isinstance(bound, Tolerance) else bound
        if _is_surely_within(output, reference, allowed, self.rows):
            return True
        errors = self.errors[number]
        worst = _largest(errors)
        if worst <= allowed:
            return True
        moves_few = math.isfinite(worst) and worst <= few * allowed
        return moves_few and _largest_of_most(errors) <= OTHER_ROWS * allowed


def compare(
    output: object,
    reference: object,
    *,
    dim: int = -1,
    rows: Tensor | None = None,
    check_dtype: bool = False,
    equal_nan: bool = False,
) -> Comparison:
    """Compare an output with its reference: tensors, or nested tuples, lists and mappings of the same types.

    Tensors of floating-point numbers have errors. Other tensors, and values that are not tensors, must be equal.

    Args:
        output: may contain lazy tensors, which are computed.
        reference: as `output`.
        dim: the dimension of a row.
        rows: for a single tensor: bool, the rows that count, in the shape of the tensor without `dim`; None for all.
        check_dtype: whether dtypes of floating-point tensors must be equal; those of others always must.
        equal_nan: whether a tensor of the reference with infinite values or NaN is compared exactly. By default its error is inf.
    """
    pairs: list[_Pair] = []
    if isinstance(reference, (Tensor, tuple, list, Mapping)):
        mismatch = _Walk(pairs, check_dtype, equal_nan).mismatch(output, reference)
    else:  # None equals None, which proves nothing
        mismatch = f"beside a reference of type {type(reference).__name__}"
    if dim != -1:
        pairs = [(ours.movedim(dim, -1), theirs.movedim(dim, -1)) for ours, theirs in pairs]
    return Comparison(tuple(pairs), mismatch, rows)


def row_error(output: object, reference: object, *, dim: int = -1) -> float:
    """Return the largest error of a row, as `Comparison.worst`; inf if the two cannot be compared."""
    return compare(output, reference, dim=dim).worst


def is_rounding(
    output: object, rounded: object, exact: object, *, dim: int = -1, rows: Tensor | None = None
) -> bool:
    """Return whether `output` is no farther from `exact` than `rounded`, the reference in a smaller dtype, is."""
    error, allowed = (compare(one, exact, dim=dim, rows=rows).worst for one in (output, rounded))
    return error <= allowed < math.inf


def float_tensors(output: object) -> list[Tensor]:
    """Return the floating-point tensors of a model output, in order; sequences and mappings may be nested."""
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in float_tensors(part)]
    return []


class _Walk:
    """A walk over an output and its reference, which adds floating-point tensors to `pairs`."""

    def __init__(self, pairs: list[_Pair], check_dtype: bool, equal_nan: bool) -> None:
        self.pairs, self.check_dtype, self.equal_nan = pairs, check_dtype, equal_nan

    def mismatch(self, output: object, reference: object) -> str | None:
        """Return the first difference that is none of floating-point numbers, or None."""
        if isinstance(reference, Tensor):
            return self._tensors(output, reference)
        if type(output) is not type(reference):
            return f"of type {type(output).__name__} instead of {type(reference).__name__}"
        if isinstance(reference, Mapping) and isinstance(output, Mapping):
            if list(output) != list(reference):
                return f"with {list(output)} instead of {list(reference)}"
            return self._parts([output[name] for name in reference], [reference[name] for name in reference])
        if isinstance(reference, tuple | list) and isinstance(output, tuple | list):
            if len(output) != len(reference):
                return f"of {len(output)} parts instead of {len(reference)}"
            return self._parts(output, reference)
        return None if output == reference else "with another value that is not a tensor"

    def _parts(self, output: Sequence[object], reference: Sequence[object]) -> str | None:
        parts = map(self.mismatch, output, reference)
        return next((part for part in parts if part is not None), None)

    def _tensors(self, output: object, reference: Tensor) -> str | None:
        if not isinstance(output, Tensor) or output.shape != reference.shape:
            shape = tuple(output.shape) if isinstance(output, Tensor) else None
            return f"of shape {shape} instead of {tuple(reference.shape)}"
        has_errors = output.is_floating_point() and reference.is_floating_point()
        if output.dtype is not reference.dtype and (self.check_dtype or not has_errors):
            return f"of dtype {output.dtype} instead of {reference.dtype}"
        ours, theirs = ordinary(output), ordinary(reference)
        if not has_errors:
            return None if torch.equal(ours, theirs) else "with other integers"
        if self.equal_nan and not theirs.isfinite().all():
            is_equal = ours.dtype is theirs.dtype and torch.allclose(ours, theirs, 0.0, 0.0, equal_nan=True)
            return None if is_equal else "with other values where the reference is not finite"
        self.pairs.append((ours, theirs))
        return None


def _row_errors(output: Tensor, reference: Tensor) -> Tensor:
    """Return the errors of the rows of [..., N], float64 [...]."""
    if reference.numel() == 0:
        return torch.zeros(reference.shape[:-1], dtype=torch.float64)
    expected = reference.double()
    norms = torch.linalg.vector_norm(expected, dim=-1)
    floor = max(1e-12, norms.max().item() * SMALL_ROW)
    return torch.linalg.vector_norm(output.double() - expected, dim=-1) / norms.clamp_min(floor)


def _largest(errors: Tensor) -> float:
    worst = errors.max().item() if errors.numel() else 0.0
    return worst if worst == worst else math.inf


def _largest_of_most(errors: Tensor) -> float:
    return errors.quantile(MOST_ROWS).item() if errors.numel() else 0.0


def _is_surely_within(output: Tensor, reference: Tensor, allowed: float, rows: Tensor | None) -> bool:
    """Return whether the error of every row is below `allowed`, in few ops and without float64.

    False decides nothing: a row may be near the bound or beyond it, or values so large (or missing) that only `_row_errors` can
    decide.
    """
    if reference.numel() == 0 or max(output.itemsize, reference.itemsize) > 4:
        return False
    expected = reference.float()
    norms = torch.linalg.vector_norm(expected, dim=-1)
    largest = norms.max().item()
    if not 1e-6 < largest < 1e16:  # squares of float32 in both directions; NaN
        return False
    distances = torch.linalg.vector_norm(output.float() - expected, dim=-1)
    within = distances <= norms.clamp_min(largest * SMALL_ROW) * (0.99 * allowed)
    if rows is not None:
        within = within | ~rows
    return bool(within.all())


def _agreement(output: Tensor, reference: Tensor) -> Agreement:
    if output.numel() == 0:
        return Agreement(1.0, 0.0)
    ours, truth = output.double(), reference.double()
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
