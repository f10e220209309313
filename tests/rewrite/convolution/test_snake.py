"""Snake activations with any parametrization become one op, and return the same in both layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_oobleck import Snake1d as OobleckSnake
from torch import Tensor, nn
from transformers import DacConfig, DacModel
from transformers.models.dac.modeling_dac import Snake1d
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniSnakeBeta

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.snake import FusedSnake

CHANNELS = 12
KINDS = {
    "alpha": lambda: Snake1d(CHANNELS),
    "alpha and beta": lambda: OobleckSnake(CHANNELS, logscale=False),
    "logarithms": lambda: OobleckSnake(CHANNELS),
    "flat logarithms": lambda: Qwen2_5OmniSnakeBeta(CHANNELS),
}


class Two(nn.Module):
    """Something to accelerate besides."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.linear = activation, nn.Linear(CHANNELS, CHANNELS)

    def forward(self, sound: Tensor) -> Tensor:
        return self.linear(self.activation(sound).transpose(1, 2))


def random_numbers(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data.uniform_(0.3, 2.0)
    return module.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found(kind: str) -> None:
    own = random_numbers(KINDS[kind]())
    model = accelerate_for_cpu(Two(copy.deepcopy(own)).eval(), dtype="float32")
    fused = model.activation
    assert isinstance(fused, FusedSnake)
    assert isinstance(fused, type(own))
    assert [item.op for item in explain(model).items if item.name == "activation"] == ["snake"]
    sound = torch.randn(2, CHANNELS, 50)
    turned = sound.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (sound, turned, sound[..., ::2]):
        with torch.no_grad():
            got, expected = fused(given), own(given)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert got.stride() == expected.stride()
    restore(model)
    assert type(model.activation) is type(own)


def test_other_calls_are_the_modules_own() -> None:
    """Images, which the class takes, too, names, and sound of other channels."""
    own = random_numbers(Snake1d(CHANNELS))
    fused = accelerate_for_cpu(Two(copy.deepcopy(own)).eval(), dtype="float32").activation
    image = torch.randn(2, CHANNELS, 5, 3)
    with torch.no_grad():
        assert torch.equal(fused(image), own(image))
        assert torch.equal(fused(hidden_states=image), own(image))
        with pytest.raises(RuntimeError, match="must match"):
            fused(image.flatten(2)[:, 1:])


@torch.no_grad()
def test_the_dtype_is_the_modules_own() -> None:
    own = random_numbers(Snake1d(CHANNELS))
    fused = accelerate_for_cpu(Two(copy.deepcopy(own)).eval(), dtype="float32").activation
    sound = torch.randn(1, CHANNELS, 9).bfloat16()
    assert torch.equal(fused(sound), own(sound))
    assert fused(sound).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_says_nothing(dtype: torch.dtype) -> None:
    host = Two(Snake1d(CHANNELS)).eval()
    torch.set_default_dtype(dtype)
    try:
        model = accelerate_for_cpu(host, dtype="float32")
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(model.activation, FusedSnake)


def test_new_weights_are_read() -> None:
    model = accelerate_for_cpu(Two(Snake1d(CHANNELS)).eval(), dtype="float32")
    sound = torch.randn(1, CHANNELS, 9)
    with torch.no_grad():
        before = model.activation(sound)
        model.activation.load_state_dict({"alpha": torch.full((1, CHANNELS, 1), 0.5)})
        after = model.activation(sound)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, sound + 2 * torch.sin(0.5 * sound) ** 2)


class Swish(nn.Module):
    """The same parameters, another function."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, CHANNELS, 1))

    def forward(self, sound: Tensor) -> Tensor:
        return sound * torch.sigmoid(self.alpha * sound)


class OtherDivisor(Snake1d):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + (self.alpha + 1e-2).reciprocal() * torch.sin(self.alpha * hidden_states) ** 2


class Bounded(Snake1d):
    """As Snake for most numbers."""

    def __init__(self, bound: Callable[[Tensor], Tensor]) -> None:
        super().__init__(CHANNELS)
        self.bound = bound

    def forward(self, hidden_states: Tensor) -> Tensor:
        alpha = self.bound(self.alpha)
        return hidden_states + (alpha + 1e-9).reciprocal() * torch.sin(alpha * hidden_states) ** 2


OTHERS = {
    "swish": Swish,
    "another divisor": lambda: OtherDivisor(CHANNELS),
    "positive": lambda: Bounded(torch.abs),
    "at least": lambda: Bounded(lambda alpha: alpha.clamp(min=0.01)),
    "at most": lambda: Bounded(lambda alpha: alpha.clamp(max=2.0)),
}


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_others_are_left(kind: Callable[[], nn.Module]) -> None:
    model = accelerate_for_cpu(Two(kind()).eval(), dtype="float32")
    assert not isinstance(model.activation, FusedSnake)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_codec(dtype: str) -> None:
    torch.manual_seed(0)
    sizes = {"downsampling_ratios": [2, 4], "upsampling_ratios": [4, 2], "n_codebooks": 2}
    own = DacModel(DacConfig(encoder_hidden_size=16, decoder_hidden_size=64, **sizes)).eval()
    for name, parameter in own.named_parameters():
        if name.endswith("alpha"):
            parameter.data.uniform_(0.3, 2.0)
    model = accelerate_for_cpu(copy.deepcopy(own), dtype=dtype)
    snakes = [module for module in model.modules() if isinstance(module, FusedSnake)]
    assert len(snakes) == sum(isinstance(module, Snake1d) for module in own.modules()) > 10
    with torch.no_grad():
        codes = own.encode(torch.randn(1, 1, 512)).quantized_representation
        got, expected = model.decode(codes).audio_values.float(), own.decode(codes).audio_values
    bound = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2}[dtype]
    assert (got - expected).norm() <= bound * expected.norm()
