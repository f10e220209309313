"""The range of images in 8 bits, from the values in examples: min/max, percentiles, or least squared error."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

STEPS = 255
_BINS = 2048
_OUTSIDE = 1e-4  # of the values, for the percentile
_SHARES = torch.linspace(0.2, 1.0, 81, dtype=torch.float64)  # of the widest range, that are tried

Range = tuple[float, float]


@dataclass
class ObservedValues:
    """The values of one image over all examples. Each example is read twice: first for min and max, then for the histogram.

    Attributes:
        low, high: the minimum and maximum of the values and 0.
        squares: the sum of the squares.
        own_error: the sum of squared errors if each image had its own range.
    """

    low: float = 0.0
    high: float = 0.0
    squares: float = 0.0
    own_error: float = 0.0
    _counts: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))

    def see_ends(self, images: Tensor) -> None:
        low, high = images.aminmax()
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    def count(self, images: Tensor) -> None:
        if not self.high > self.low:
            return
        values = images[images != 0].float()  # zeros are exact in every range
        self._counts += torch.histc(values, _BINS, self.low, self.high).double()
        self.squares += float(values.double().square().sum())
        for image in images:
            width = (max(float(image.max()), 0.0) - min(float(image.min()), 0.0)) / STEPS
            self.own_error += int(image.count_nonzero()) * width * width / 12

    def range(self, method: str) -> Range:
        """Return the range by one of the methods in `config.STATIC_RANGES`."""
        if method == "min-max" or not self.high > self.low:
            return self.low, self.high
        if method == "percentile":
            return self._percentiles()
        errors = [self.error(self._part(float(share))) for share in _SHARES]
        return self._part(float(_SHARES[errors.index(min(errors))]))

    def error(self, range: Range) -> float:
        """Return the sum of squared errors in `range`, estimated from the histogram."""
        low, high = range
        middles = self._middles()
        outside = (middles - middles.clamp(low, high)).square()
        width = (high - low) / STEPS
        inside = (middles >= low) & (middles <= high)
        return float((self._counts * torch.where(inside, width * width / 12, outside)).sum())

    def relative(self, error: float) -> float:
        """Return the norm of an error relative to the norm of the values."""
        return float((error / self.squares) ** 0.5) if self.squares else 0.0

    def _middles(self) -> Tensor:
        places = torch.arange(_BINS, dtype=torch.float64) + 0.5
        return self.low + places * ((self.high - self.low) / _BINS)

    def _part(self, share: float) -> Range:
        return share * self.low, share * self.high

    def _percentiles(self) -> Range:
        below = self._counts.cumsum(0) / self._counts.sum()
        middles = self._middles()
        ends = (below >= _OUTSIDE / 2).nonzero()[0], (below >= 1 - _OUTSIDE / 2).nonzero()[0]
        low, high = (float(middles[end]) for end in ends)
        return min(low, 0.0) if self.low < 0 else 0.0, max(high, 0.0) if self.high > 0 else 0.0
