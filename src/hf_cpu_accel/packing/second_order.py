"""Rounding of weights that minimizes the error of the outputs for calibration inputs (GPTQ, then coordinate descent).

- Frantar et al. 2022 (GPTQ, arXiv:2210.17323): the squared error of the outputs is quadratic in the error of the weights, and its
  matrix is the second moments of the inputs. Input features are rounded one after another. The error of each is compensated in the
  features after it, by the Cholesky factor of the inverse matrix.
- The grids are uneven levels and an integer per group of the rotated weight (int4.py), or affine groups (affine.py). Each group's
  grid is chosen when its rounding starts, for its compensated weights.
- Behdin et al. 2023 (QuantEase, arXiv:2309.01885): afterwards each feature is rounded again with all others fixed, which reduced
  the error of a small language model by another 4 %.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.packing import affine, int4
from hf_cpu_accel.packing.affine import BITS, AffineGroups
from hf_cpu_accel.packing.linear import PackedWeight, pack_affine
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate
from hf_cpu_accel.packing.rotation import rotate, rotate_back

# The share of the mean of the diagonal that is added to the diagonal, for inputs that the examples lack.
DAMPING = 0.01
SWEEPS = 2  # of coordinate descent

_LEVELS = torch.tensor(int4.LEVELS, dtype=torch.float32)
_BETWEEN = (_LEVELS[1:] + _LEVELS[:-1]) / 2


@dataclass(frozen=True, eq=False)
class Curvature:
    """The matrix of the squared error of the outputs, as a function of the errors of the weights.

    Attributes:
        matrix: float32 [K, K], the second moments of the inputs, damped.
        factor: float32 [K, K], upper triangular U with U^T U the inverse of that.
    """

    matrix: Tensor
    factor: Tensor

    @classmethod
    def of(cls, gram: Tensor, damping: float) -> Curvature:
        """Compute it in float64 from the second moments `gram`.

        Raises:
            ValueError: `gram` is not finite.
        """
        matrix = gram.double()
        mean = matrix.diagonal().mean().item() if len(matrix) else 0.0
        if not abs(mean) < float("inf"):
            raise ValueError("the calibration inputs contain NaN, infinity or values too large to square")
        matrix.diagonal().add_(damping * mean if mean > 0 else 1.0)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        return cls(matrix.float(), torch.linalg.cholesky(inverse, upper=True).float())

    def padded(self, features: int) -> Curvature:
        """Return it with `features` more input features that have no effect."""
        more = (0, features, 0, features)
        matrix, factor = F.pad(self.matrix, more), F.pad(self.factor, more)
        for values in (matrix, factor):
            values.diagonal()[len(self.matrix) :] = 1.0
        return Curvature(matrix, factor)


@dataclass(frozen=True, eq=False)
class InputMoments:
    """The second moments of the inputs of linear layers.

    Attributes:
        gram: float32 [K, K], the mean of x x^T over the rows x.
        damping: see DAMPING.
    """

    gram: Tensor
    damping: float = DAMPING

    @cached_property
    def plain(self) -> Curvature:
        """The curvature for weights that are not rotated."""
        return Curvature.of(self.gram, self.damping)

    @cached_property
    def rotated(self) -> Curvature:
        """The curvature for rotated weights and rotated inputs."""
        return Curvature.of(rotate(rotate(self.gram).T), self.damping)

    def error(self, weight: Tensor, rounded: Tensor) -> float:
        """Return the root mean square error of the outputs, relative to the outputs."""
        off = weight - rounded
        squares = ((off @ self.gram) * off).sum() / ((weight @ self.gram) * weight).sum().clamp_min(1e-30)
        return squares.clamp_min(0).sqrt().item()


def pack_rounded(
    weight: Tensor, moments: InputMoments, form: str, group: int, *, sweeps: int = SWEEPS
) -> PackedWeight:
    """Pack a weight as `packing.pack_linear`, but minimize the error of the outputs instead of the weight.

    Args:
        weight: [N, K] floating point.
        moments: of the inputs, K features.
        form: "int4", "affine4" or "affine8".
        group: the number of input features per group, see these forms.
        sweeps: the number of rounds of coordinate descent.
    """
    rows, columns = weight.shape
    values = weight.detach().float()
    if form in BITS:
        ranges = _Affine(rows, columns, BITS[form], group)
        _round(values, moments.plain, ranges, sweeps)
        return pack_affine(ranges.result(columns))
    values = F.pad(rotate_back(values), (0, 0, 0, -rows % PANEL_FEATURES))
    levels = _Levels(values, group)
    _round(values, moments.rotated, levels, sweeps)
    index, multiplier, scale = levels.result()
    data = int4.pack(index, multiplier, group)
    return PackedWeight(
        allocate(data.shape, data.dtype).copy_(data), scale[:, :rows].contiguous(), columns, rows, "int4"
    )


class _Grid(ABC):
    """A grid to round weights to, group by group: `begin` a group, then `round` each of its input features."""

    group: int

    @abstractmethod
    def begin(self, number: int, values: Tensor, importance: Tensor) -> None:
        """Choose the grid of a group for `values` [N, at most group]; `importance` has the weights of the squared errors."""

    @abstractmethod
    def round(self, feature: int, values: Tensor) -> Tensor:
        """Round `values` [N] of an input feature to the grid, store the result and return it."""


def _round(weight: Tensor, curvature: Curvature, grid: _Grid, sweeps: int) -> None:
    """Round `weight` [N, K] feature by feature; `curvature` is of K inputs."""
    count = weight.shape[1]
    padded = -count % grid.group  # zeros, which get no error
    columns = F.pad(weight, (0, padded)).T.contiguous()
    curvature = curvature.padded(padded)
    rounded = _feed_back(columns.clone(), curvature.factor, grid, count)
    for _ in range(sweeps):
        _round_again(columns - rounded, rounded, curvature.matrix, grid)


def _feed_back(left: Tensor, factor: Tensor, grid: _Grid, count: int) -> Tensor:
    """Round `left` [K, N], overwriting it, and compensate the error of each feature in later ones; `count` features are real."""
    group, rounded = grid.group, torch.empty_like(left)
    importance = factor.diagonal().square().reciprocal()
    for start in range(0, len(left), group):
        stop = start + group
        here, within = left[start:stop], factor[start:stop, start:stop]
        real = slice(start, min(stop, count))
        grid.begin(start // group, left[real].T.contiguous(), importance[real])
        errors = torch.empty_like(here)
        for place in range(group):
            rounded[start + place] = grid.round(start + place, here[place])
            errors[place] = (here[place] - rounded[start + place]) / within[place, place]
            here[place + 1 :].addr_(within[place, place + 1 :], errors[place], alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return rounded


def _round_again(off: Tensor, rounded: Tensor, matrix: Tensor, grid: _Grid) -> None:
    """Round each feature of `rounded` [K, N] again with the others fixed; `off` is the weight minus `rounded`."""
    group = grid.group
    for start in range(0, len(off), group):
        within = matrix[start : start + group, start : start + group]
        pull = matrix[start : start + group] @ off
        for place in range(group):
            feature = start + place
            best = grid.round(feature, rounded[feature] + pull[place] / within[place, place])
            moved = best - rounded[feature]
            pull.addr_(within[:, place], moved, alpha=-1)
            off[feature] -= moved
            rounded[feature] = best


class _Levels(_Grid):
    """The grid of int4.py, for the rotated weight [N, K]."""

    def __init__(self, weight: Tensor, group: int) -> None:
        rows, groups = weight.shape[0], -(-weight.shape[1] // group)
        self.group = group
        self._scale = int4.row_scales(weight)
        self._step = torch.where(self._scale > 0, self._scale, 1.0)
        self._multiplier = torch.zeros(groups, rows)
        self._index = torch.zeros(groups * group, rows, dtype=torch.uint8)

    def begin(self, number: int, values: Tensor, importance: Tensor) -> None:
        self._multiplier[number] = int4.best_multipliers(values / self._step[:, None], importance)[:, 0]

    def round(self, feature: int, values: Tensor) -> Tensor:
        unit = self._multiplier[feature // self.group] * self._step
        index = torch.bucketize(values / unit, _BETWEEN, out_int32=True)
        self._index[feature] = index
        return _LEVELS[index].mul_(unit)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `int4.quantize`."""
        levels = _LEVELS[self._index.int()].unflatten(0, (-1, self.group))
        sums = (levels * self._multiplier[:, None]).sum(dim=(0, 1))
        index, multiplier = self._index.T.contiguous(), self._multiplier.T.to(torch.int8).contiguous()
        return index, multiplier, torch.stack([self._scale, sums])


class _Affine(_Grid):
    """The grid of affine.py."""

    def __init__(self, rows: int, columns: int, bits: int, group: int) -> None:
        affine.check_group(group)
        groups = -(-columns // group)
        self.group, self._bits = group, bits
        self._scale, self._offset = torch.zeros(groups, rows), torch.zeros(groups, rows)
        self._q = torch.zeros(groups * group, rows, dtype=torch.uint8)

    def begin(self, number: int, values: Tensor, importance: Tensor) -> None:
        scale, offset = affine.best_range(values, self._bits, importance)
        self._scale[number], self._offset[number] = scale[:, 0], offset[:, 0]

    def round(self, feature: int, values: Tensor) -> Tensor:
        number = feature // self.group
        q = affine.nearest(values, self._scale[number], self._offset[number], self._bits)
        self._q[feature] = q
        return q.mul_(self._scale[number]).add_(self._offset[number])

    def result(self, columns: int) -> AffineGroups:
        q = self._q[:columns].T.contiguous()
        return AffineGroups(
            q, self._scale.T.contiguous(), self._offset.T.contiguous(), self._bits, self.group
        )
