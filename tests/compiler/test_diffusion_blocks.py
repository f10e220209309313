"""What becomes of the blocks of Stable Diffusion's UNet, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D, UpBlock2D
from torch import Tensor, nn

from hf_cpu_accel.providers import convolution as providers
from tests.compiler.conftest import only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.fixture(autouse=True)
def _our_convolution_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fused must not depend on a measurement here."""
    monkeypatch.setattr(providers, "native_is_faster", lambda *args, **kwargs: True)


class Down(nn.Module):
    """Resnet, transformer, downsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.block = CrossAttnDownBlock2D(
            32,
            64,
            temb_channels=48,
            num_layers=1,
            resnet_groups=8,
            num_attention_heads=4,
            cross_attention_dim=40,
        )

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        return self.block(x, time, encoder_hidden_states=text)[0]


class Up(nn.Module):
    """Resnets on what is joined with the way down, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.block = UpBlock2D(32, 64, 64, temb_channels=48, num_layers=2, resnet_groups=8)

    def forward(self, x: Tensor, first: Tensor, second: Tensor, time: Tensor) -> Tensor:
        return self.block(x, (first, second), time)


def _rewrites() -> dict[str, int]:
    return {name: n for name, n in only_graph().rewrites.items() if n and name not in ("simplify", "views")}


def test_a_block_with_attention(found: Any) -> None:
    inputs = torch.randn(2, 32, 8, 8), torch.randn(2, 48), torch.randn(2, 5, 40)
    assert found(Down(), *inputs) == {
        "conv2d": 6,  # two of the resnet and its shortcut, into and out of the transformer, downsampling
        "group_norm": 3,  # two of the resnet, with their SiLU
        "layer_norm": 3,
        "linear_split": 2,  # query, key and value of self-attention; key and value of the text
        "attention": 2,
        "linear": 4,  # the time, the query for the text, both outputs
        "gated_ffn": 1,
    }
    assert _rewrites() == {
        "convolution": 6,
        "group_norm": 5,  # three, and SiLU behind two of them
        "norm": 3,
        "attention": 2,
        "linear": 11,
        "parallel_linears": 2,
        "gated_ffn": 1,
        "residual": 3,
    }


def test_a_block_of_resnets(found: Any) -> None:
    inputs = torch.randn(2, 64, 8, 8), torch.randn(2, 32, 8, 8), torch.randn(2, 64, 8, 8), torch.randn(2, 48)
    assert found(Up(), *inputs) == {"conv2d": 7, "group_norm": 4, "linear": 2}
    assert _rewrites() == {"convolution": 7, "group_norm": 8, "linear": 2}
