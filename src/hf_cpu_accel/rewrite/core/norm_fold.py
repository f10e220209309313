"""Fold a norm with fixed statistics into the convolution before it, as a scale and a shift per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A weight cannot be recovered from its product with a smaller gain.
_SMALLEST = 1e-20


@dataclass(frozen=True, eq=False)
class Fold:
    """The norm after a convolution as gain * output + shift per channel.

    Attributes:
        gain, shift: [out_channels] float32.
    """

    gain: Tensor
    shift: Tensor

    def bias(self, bias: Tensor | None) -> Tensor:
        """Return the bias of convolution and norm together, float32."""
        return self.shift if bias is None else torch.addcmul(self.shift, self.gain, bias.detach().float())

    def weight(self, weight: Tensor) -> Tensor:
        """Return the weight [out_channels, ...] of convolution and norm together, float32."""
        return weight.detach().float() * self._per_row(weight)

    def lost(self, weight: Tensor) -> Tensor:
        """Return copies of the rows of `weight` that `unfolded` cannot recover, because their gain is close to zero."""
        return weight.detach()[self._small]

    def unfolded(self, weight: Tensor, lost: Tensor) -> Tensor:
        """Return the weight of the convolution alone, up to rounding."""
        values = weight.float() / self._per_row(weight)
        values[self._small] = lost.float()
        return values

    def normalize(self, output: Tensor) -> Tensor:
        """Return the normalized output [N, C, H, W], in its dtype."""
        shape = (-1, 1, 1)
        return torch.addcmul(self.shift.view(shape), output.float(), self.gain.view(shape)).to(output.dtype)

    @property
    def _small(self) -> Tensor:
        return self.gain.abs() < _SMALLEST

    def _per_row(self, weight: Tensor) -> Tensor:
        return self.gain.view(-1, *(1,) * (weight.dim() - 1))


@dataclass(frozen=True)
class NormAfter:
    """A norm that is folded into the convolution before it; `path` is the path of the norm."""

    norm: nn.Module
    path: str
    fold: Fold
