"""Containers around two linears."""

import pytest
import torch
from torch import nn

from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.rewrite.containers import X, agrees, counts_of


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Identity()])
def test_feed_forward(activation, dtype, bound):
    part = nn.Sequential(nn.Linear(64, 100), activation, nn.Dropout(0.1), nn.Linear(100, 40, bias=False))
    assert agrees(part, X, dtype=dtype, bound=bound) == {"ffn": 2}


def test_feed_forward_keeps_paths_and_indexing():
    part = nn.Sequential(nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 64))
    model, _ = counts_of(part)
    assert list(model.state_dict()) == ["part.0.weight", "part.0.bias", "part.2.weight", "part.2.bias"]
    assert len(model.part) == 3
    assert isinstance(model.part[0], PackedLinear)
    with torch.no_grad():
        output = X
        for step in model.part:
            output = step(output)
        torch.testing.assert_close(model(X), output, rtol=1e-4, atol=1e-5)


def test_feed_forward_in_the_other_order_of_registration():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(128, 64), nn.Linear(64, 128)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    assert agrees(Reversed(), X) == {"ffn": 2}
