"""Norms written as Python modules of a model."""

import pytest
import torch
from torch import nn

from tests.rewrite.containers import RMSNorm, X, agrees


class MeanNorm(nn.Module):
    def __init__(self, size, eps=1e-7):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size) + 0.5), nn.Parameter(torch.rand(size))
        self.epsilon = eps

    def forward(self, x):
        centered = x - x.mean(-1, keepdim=True)
        return (
            self.weight * centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + self.epsilon)
            + self.bias
        )


@pytest.mark.parametrize(
    ("norm", "counts"),
    [
        (RMSNorm(64), {"rms norm": 1}),
        (RMSNorm(64, eps=1e-12), {"rms norm": 1}),
        (MeanNorm(64), {"layer norm": 1}),
        (RMSNorm(64, offset=1.0), {"rms norm": 1}),
        (nn.LayerNorm(64), {}),
        (nn.BatchNorm1d(7), {}),
    ],
    ids=["rms", "rms small eps", "layer norm", "gemma", "torch", "batch norm"],
)
def test_norms(norm, counts):
    assert agrees(norm, X) == counts
    assert agrees(norm, X * 1e-4) == counts
