"""Changes of convolutions after acceleration take effect, also if only some images show them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock

CHANNELS = 32


class Inverted(nn.Module):
    """An inverted residual block (Sandler et al. 2018, arXiv:1801.04381)."""

    def __init__(self, stride: int = 1, drop: float = 0.0) -> None:
        super().__init__()
        self.expand, self.first = nn.Conv2d(CHANNELS, 64, 1), nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, stride, padding=1, groups=64)
        self.project, self.last = nn.Conv2d(64, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.expand(x)))
        y = self.drop(self.last(self.project(torch.relu(self.depthwise(y)))))
        return x + y if y.shape == x.shape else y


def block(stride: int = 1, drop: float = 0.0) -> nn.Module:
    return nn.Sequential(Inverted(stride, drop))


def alone(kernel: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        convolution = nn.Conv2d(CHANNELS, CHANNELS, kernel, padding=kernel // 2)
        return nn.Sequential(convolution, nn.BatchNorm2d(CHANNELS), nn.ReLU())

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "block": (block, "0.expand"),
    "end of a block": (block, "0.project"),
    "pixels": (alone(1), "0"),
    "windows": (alone(3), "0"),
}


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Eager, and accelerated."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    eager = copy.deepcopy(model.eval())
    return eager, accelerate_for_cpu(model, dtype="float32")


def error(eager: nn.Module, ours: nn.Module, *input: Tensor) -> float:
    with torch.no_grad():
        return row_error(ours(*input).movedim(1, -1), eager(*input).movedim(1, -1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["written to", "exchanged"])
def test_a_bias_that_a_norm_was_folded_into_is_followed(name: str, way: str) -> None:
    build, path = MODELS[name]
    image = torch.randn(2, CHANNELS, 9, 10)
    eager, ours = pair(build())
    assert error(eager, ours, image) < 1e-4
    for model in (eager, ours):
        convolution = model.get_submodule(path)
        with torch.no_grad():
            if way == "written to":
                convolution.bias.add_(1.0)
            else:
                convolution.bias = nn.Parameter(convolution.bias + 1.0, requires_grad=False)
    assert error(eager, ours, image) < 1e-4


@pytest.mark.parametrize("path", ["attention.self.query", "attention.self.value", "intermediate.dense"])
def test_an_exchanged_bias_of_an_encoder_layer_is_followed(path: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    eager = BertModel(BertConfig(**sizes, vocab_size=99)).eval()
    ours = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        ours(ids)
        for model in (eager, ours):
            linear = model.encoder.layer[0].get_submodule(path)
            linear.bias = nn.Parameter(linear.bias + torch.linspace(0, 2, len(linear.bias)))
        assert row_error(ours(ids)[0], eager(ids)[0]) < 1e-4


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 1, 1), (3, 2, 2), (2, 17, 18)])
def test_a_sum_where_shapes_are_alike(stride: int, size: tuple[int, int, int]) -> None:
    eager, ours = pair(block(stride))
    assert isinstance(ours[0], FusedResidualBlock) == (
        stride == 1
    )  # of one pixel, half of them is the same image
    batch, height, width = size
    assert error(eager, ours, torch.randn(batch, CHANNELS, height, width)) < 1e-4


def test_dropout_that_is_switched_on_inside_drops() -> None:
    eager, ours = pair(block(drop=0.5))
    assert isinstance(ours[0], FusedResidualBlock)
    image = torch.randn(1, CHANNELS, 9, 9)
    with torch.no_grad():
        assert torch.equal(ours(image), ours(image))
        ours[0].drop.train()
        assert not torch.equal(ours(image), ours(image))
        ours[0].drop.eval()
    assert error(eager, ours, image) < 1e-4


def test_a_bias_that_is_cast_to_bfloat16_follows_writes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 5, padding=2, groups=CHANNELS), nn.Identity()).eval()
    accelerate_for_cpu(model, dtype="bfloat16", verify=False)
    image = torch.randn(1, CHANNELS, 32, 32)
    with torch.no_grad():
        before = model(image)
        model[0].bias.data += 1  # no version counter sees it
        change = model(image) - before
    assert torch.allclose(change, torch.ones_like(change), atol=2e-2)
