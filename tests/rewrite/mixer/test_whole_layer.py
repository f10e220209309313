"""Layers with a fused mixer as a whole: every place of norms, residual factors and feed-forward networks that they may have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2RMSNorm, Lfm2ShortConv

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.mixer.whole_layer import FusedMixerLayer

FEATURES = 64


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(FEATURES, 128), nn.Linear(FEATURES, 128)
        self.down = nn.Linear(128, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """x + scale post(mixer(norm(x))), then the same with a feed-forward network."""

    def __init__(self, *, ffn: bool = True, post: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        config = Lfm2Config(hidden_size=FEATURES, conv_L_cache=3, num_hidden_layers=1)
        self.conv, self.scale, self.post = Lfm2ShortConv(config, 0), scale, post
        names = ["norm", *(["ffn_norm"] if ffn else []), *(["post", "ffn_post"] if post else [])]
        self.norms = names
        for name in names:
            self.add_module(f"{name}_module" if name == "post" else name, Lfm2RMSNorm(FEATURES))
        if ffn:
            self.ffn = Gated()

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None
    ) -> Tensor:
        mixed = self.conv(self.norm(hidden_states), past_key_values, attention_mask)
        mixed = self.post_module(mixed) if self.post else mixed
        hidden_states = hidden_states + mixed * self.scale
        if "ffn_norm" not in self.norms:
            return hidden_states
        fed = self.ffn(self.ffn_norm(hidden_states))
        return hidden_states + (self.ffn_post(fed) if self.post else fed) * self.scale


class NormOfTheSum(Layer):
    """A layer that normalizes after the sum, which no part of the op computes."""

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None
    ) -> Tensor:
        mixed = self.norm(hidden_states + self.conv(hidden_states, past_key_values, attention_mask))
        return self.ffn_norm(mixed + self.ffn(mixed))


class WithParameter(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(FEATURES))

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None
    ) -> Tensor:
        return super().forward(hidden_states, past_key_values, attention_mask) * self.gain


class Model(nn.Module):
    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(**options) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def accelerated(layer: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return (eager model, accelerated copy)."""
    torch.manual_seed(0)
    eager = Model(layer, **options).eval()
    for parameter in eager.parameters():
        nn.init.normal_(parameter, std=0.2)
    return eager, accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")


def error(eager: nn.Module, ours: nn.Module, tokens: int = 9) -> float:
    x = torch.randn(2, tokens, FEATURES)
    with torch.no_grad():
        return row_error(ours(x), eager(x))


@pytest.mark.parametrize("ffn", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_layer_is_one_module(ffn, scale):
    eager, ours = accelerated(Layer, ffn=ffn, scale=scale)
    assert all(isinstance(layer, FusedMixerLayer) for layer in ours.layers)
    assert error(eager, ours) < 1e-5
    assert error(eager, ours, tokens=1) < 1e-5


def test_norms_after_the_branches():
    eager, ours = accelerated(Layer, post=True)
    assert all(isinstance(layer, FusedMixerLayer) for layer in ours.layers)
    assert error(eager, ours) < 1e-5


@pytest.mark.parametrize("layer", [NormOfTheSum, WithParameter])
def test_of_other_layers_the_mixer_is_fused(layer):
    eager, ours = accelerated(layer)
    assert not any(isinstance(part, FusedMixerLayer) for part in ours.layers)
    assert [item.op for item in explain(ours).items if item.name == "layers.0.conv"] == ["short_convolution"]
    assert error(eager, ours) < 1e-5


def test_a_layer_follows_writes_to_its_weights():
    eager, ours = accelerated(Layer)
    for model in (eager, ours):
        model.layers[0].norm.weight.data.mul_(1.5)
        model.layers[1].ffn_norm.weight.data.mul_(0.5)
    assert error(eager, ours) < 1e-5
