"""A module that a plain list also holds: a loop over the list would not see a replacement."""

import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore


class _Block(nn.Module):
    """Mask2Former's: its layers are named for the checkpoint, and called through a list."""

    def __init__(self, activation):
        super().__init__()
        self.layers = [nn.Linear(64, 64), activation]
        for place, layer in enumerate(self.layers):
            self.add_module(str(place), layer)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class _Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_Block(nn.ReLU()), _Block(nn.Identity())])
        self.listed = (self.blocks[0],)
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.blocks[1](self.listed[0](x)))


def test_it_is_left_and_says_why():
    model, x = _Stack().eval(), torch.randn(3, 64)
    with torch.no_grad():
        before = model(x)
        accelerate_for_cpu(model, dtype="float32")
        assert torch.allclose(model(x), before, atol=1e-5)
        reasons = {item.name: item.reason for item in explain(model).items}
        assert "plain Python list" in reasons["blocks.0.0"]
        assert reasons["last"] is None
        assert torch.equal(restore(model)(x), before)
