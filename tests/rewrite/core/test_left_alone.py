"""Every module with weights is replaced, or `explain()` gives the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hf_cpu_accel import accelerate_for_cpu, explain


class Router(nn.Module):
    """A matrix, and more than a product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).softmax(-1)


class Position(nn.Module):
    """Parameters of its own besides modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8, 32))
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.position[:, : x.shape[1]])


class Heads(nn.Module):
    """Several matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("blc,hcd->bld", x, self.matrices)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.sigmoid()


@pytest.mark.parametrize(
    ("build", "path", "words"),
    [
        (Router, "0", "uses weight [4, 32], but is neither"),
        (Position, "0", "uses position [1, 8, 32] directly"),
        (Heads, "0", "matrices [4, 32, 32] as a stack of matrices"),
        (Gain, "0", "only vectors (gain [32])"),
        (lambda: nn.Conv1d(32, 32, 3, groups=32), "0", "over 1 dimension with groups=32"),
        (lambda: nn.Conv3d(32, 32, 3, dilation=2), "0", "with dilation=(2, 2, 2)"),
        (lambda: nn.Conv1d(32, 32, 3, dilation=2), "0", "PyTorch's kernel is as fast in float32"),
        (lambda: nn.Conv1d(32, 32, 3), "0", "PyTorch's kernel is as fast in float32"),
        (lambda: nn.ConvTranspose3d(32, 32, 3), "0", "a transposed convolution over 3"),
        (lambda: spectral_norm(nn.Conv1d(32, 32, 3)), "0", "a parametrization recomputes its weight"),
        (lambda: nn.BatchNorm1d(32), "0", "a batch norm that does not directly follow a convolution"),
        (lambda: nn.GRU(32, 32), "0", "a recurrent network"),
        (lambda: nn.PReLU(32), "0", "an activation with parameters"),
        (lambda: nn.Embedding(9, 32), "0", "a table lookup"),
    ],
)
def test_the_obstacle_is_named(build: Any, path: str, words: str) -> None:
    model = accelerate_for_cpu(nn.Sequential(build(), nn.Linear(32, 32)).eval(), dtype="float32")
    reasons = {item.name: item.reason for item in explain(model).items}
    assert words in (reasons[path] or "")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["ResNet", "Clip", "Wav2Vec2"])
def test_nothing_is_passed_over(name: str, dtype: str) -> None:
    model = MODELS[name]().eval()
    weighted = [path for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    items = explain(accelerate_for_cpu(model, dtype=dtype)).items
    told, whole = {item.name for item in items}, [item.name for item in items if item.reason is None]
    assert not [p for p in weighted if p not in told and not any(p.startswith(f"{w}.") for w in whole)]


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
FRONT = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16}
MODELS = {
    "ResNet": lambda: tf.ResNetModel(
        tf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 1])
    ),
    "Clip": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**SIZES, image_size=32, patch_size=8)),
    "Wav2Vec2": lambda: tf.Wav2Vec2Model(
        tf.Wav2Vec2Config(**SIZES, **FRONT, num_conv_pos_embedding_groups=4)
    ),
}
