"""Residual blocks and whole stages in one call; what is something else keeps its own forward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ResNetConfig, ResNetModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers import convolution as providers
from hf_cpu_accel.rewrite.convolution import gemm
from hf_cpu_accel.rewrite.convolution.residual_block import STRUCTURE, FusedResidualBlock
from tests.rewrite.convolution.convolution_blocks import Bottleneck, Layer, Residual, with_statistics

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06}


@pytest.fixture(autouse=True)
def _ours_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU where our convolutions were measured to be the faster ones."""
    monkeypatch.setattr(gemm, "own_is_faster", lambda *args, **kwargs: True)
    monkeypatch.setattr("hf_cpu_accel.providers.switch.why_not", lambda *args: None)
    monkeypatch.setattr("hf_cpu_accel.providers.choice.FEWEST_ROWS", 1 << 40)  # and nothing else is measured
    monkeypatch.setattr("hf_cpu_accel.providers.route.FEWEST_ROWS", 1 << 40)


class Block(nn.Module):
    """As in transformers' ResNet: two layers, the shortcut an identity or a convolution, the sum in place."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        same = channels == out_channels
        self.shortcut = nn.Identity() if same else Layer(channels, out_channels, 1, act=nn.Identity())
        first = Layer(channels, out_channels, 3, act=nn.ReLU())
        self.layer = nn.Sequential(first, Layer(out_channels, out_channels, 3, act=nn.Identity()))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.layer(x)
        x += self.shortcut(residual)
        return self.activation(x)


class Squeezed(Block):
    """Something between two convolutions that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean()


class Scaled(Block):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__(channels, out_channels)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class InPlace(Block):
    """Writes to its input before the convolutions read it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.relu(x, inplace=True))


def host(*blocks: nn.Module) -> nn.Module:
    """The blocks in a stage, which is no target itself."""
    return with_statistics(nn.ModuleDict({"stage": nn.Sequential(*blocks)}))


def image(channels: int = 32) -> Tensor:
    return torch.randn(2, channels, 11, 9).contiguous(memory_format=torch.channels_last)


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_values_and_the_way_back(dtype: str) -> None:
    model, x = host(Block(32, 48), Block(48, 48)), image()
    original, expected = model["stage"], model["stage"](x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    fused = model["stage"]
    assert isinstance(fused, FusedResidualBlock)
    assert isinstance(fused, nn.Sequential)
    assert [(link.source, link.residual, link.activation) for link in fused._chain] == [
        *[(0, None, "relu"), (0, None, "none"), (1, 2, "relu")],
        *[(3, None, "relu"), (4, 3, "relu")],
    ]
    assert explain(model).counts()[STRUCTURE] == 1
    for batch in (x, x[:1], x.contiguous(), torch.randn(1, 32, 30, 17)):
        reference = original(batch) if batch.shape != x.shape else expected
        assert error(fused(batch), reference) <= TOLERANCES[dtype]
    restore(model)
    assert model["stage"] is original
    assert torch.equal(model["stage"](x), expected)


def test_floating_weights_come_back_from_their_norms() -> None:
    """The norm's gain is in the packed weight: `state_dict` gives the convolution's own."""
    model = host(Block(32, 48))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype="float32", originals="drop")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_resnet_has_a_call_for_its_stem_and_each_stage(dtype: str) -> None:
    sizes = {
        "embedding_size": 16,
        "hidden_sizes": [64, 96, 128],
        "depths": [1, 2, 1],
        "layer_type": "bottleneck",
    }
    model = with_statistics(ResNetModel(ResNetConfig(**sizes)))
    pixels = torch.randn(2, 3, 64, 48)
    expected = model(pixels, output_hidden_states=True)
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()[STRUCTURE] == 4
    got = model(pixels, output_hidden_states=True)
    for ours, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        assert ours.dtype is torch.float32
        assert error(ours, theirs) <= TOLERANCES[dtype]
    assert torch.equal(model(pixels).last_hidden_state, got.last_hidden_state)
    assert torch.equal(model(pixels).last_hidden_state, got.last_hidden_state)


class Damped(Block):
    """Writes to what a convolution made, by less than the proof would see in int8."""

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer[1](self.layer[0](x).mul_(0.99)) + self.shortcut(x))


class Clamped(Block):
    """Does something to numbers that no small image of random ones has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp_(max=1e4)


class Widened(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize("block", [Squeezed, Scaled, Damped, Clamped, Widened])
def test_what_does_something_else_is_left(block: type[nn.Module]) -> None:
    model, x = host(block(32, 32), nn.Sigmoid()), image()
    expected = model["stage"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert not isinstance(model["stage"], FusedResidualBlock)
    assert not isinstance(model["stage"][0], FusedResidualBlock)
    torch.testing.assert_close(model["stage"](x), expected, atol=1e-4, rtol=1e-4)


def test_a_block_that_writes_to_its_input_is_left() -> None:
    model, x = host(InPlace(32, 32)), image()
    expected = model["stage"](x.clone()).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert not isinstance(model["stage"], FusedResidualBlock)
    assert not isinstance(model["stage"][0], FusedResidualBlock)
    torch.testing.assert_close(model["stage"](x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int8-weight", "int4"])
def test_pixels_alone_are_left_to_whoever_is_fastest(dtype: str) -> None:
    model, x = host(nn.Conv2d(32, 64, 1), nn.GELU(), nn.Conv2d(64, 32, 1)), image()
    expected = model["stage"](x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    ours_in_any_case = dtype in ("int8", "int4")
    assert (STRUCTURE in explain(model).counts()) == ours_in_any_case
    assert error(model["stage"](x), expected) <= 0.3


class Stem(nn.Module):
    """As in transformers' ResNet, with its pooling."""

    def __init__(self, pooling: nn.Module, channels: int = 3) -> None:
        super().__init__()
        self.embedder, self.pooler = Layer(channels, 64, 7, act=nn.ReLU()), pooling

    def forward(self, x: Tensor) -> Tensor:
        return self.pooler(self.embedder(x))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("pooling", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 3), stride=(3, 1))])
def test_a_stem_with_its_pooling(dtype: str, pooling: nn.Module) -> None:
    model, photo = host(Stem(pooling)), torch.randn(2, 3, 31, 40)
    expected = model["stage"](photo)
    accelerate_for_cpu(model, dtype=dtype)
    fused = model["stage"]
    assert isinstance(fused, FusedResidualBlock)
    # Three channels are no matter for 8 bits.
    assert fused[0].embedder.convolution.packed_dtype == ("float32" if dtype == "float32" else "bfloat16")
    got = fused(photo)
    assert got.shape == expected.shape
    assert error(got, expected) <= TOLERANCES[dtype]
    with pytest.raises(RuntimeError):
        fused(torch.randn(1, 4, 31, 40))


@pytest.mark.parametrize(
    "pooling",
    [
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d(3, 2, dilation=2),
        nn.AvgPool2d(3, 2),
        nn.AdaptiveMaxPool2d(3),
    ],
)
def test_other_poolings_stay_torchs(pooling: nn.Module) -> None:
    model, photo = host(Stem(pooling)), torch.randn(2, 3, 31, 40)
    expected = model["stage"](photo)
    accelerate_for_cpu(model, dtype="float32")
    assert not any(isinstance(module, FusedResidualBlock) for module in model.modules())
    assert error(model["stage"](photo), expected) <= TOLERANCES["float32"]


def test_a_pooling_of_the_input_alone_is_no_start() -> None:
    """Nothing tells how many channels it takes."""
    model, x = host(nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.ReLU()), image()
    expected = model["stage"](x)
    accelerate_for_cpu(model, dtype="float32")
    assert not any(isinstance(module, FusedResidualBlock) for module in model.modules())
    assert error(model["stage"](x), expected) <= TOLERANCES["float32"]


def test_a_pooling_with_a_forward_of_its_own_is_left_to_it() -> None:
    model, photo = host(Stem(nn.MaxPool2d((3,), 2))), torch.randn(2, 3, 31, 40)
    pooling = model["stage"][0].pooler
    pooling.forward = lambda x: 2 * nn.MaxPool2d.forward(pooling, x)
    expected = model["stage"](photo)
    accelerate_for_cpu(model, dtype="float32")
    assert "forward" in vars(pooling)
    assert not isinstance(model["stage"], FusedResidualBlock)
    assert error(model["stage"](photo), expected) <= TOLERANCES["float32"]


@pytest.mark.parametrize("skipped", [[], ["stage.0.pooler"]])
def test_a_pooling_can_be_skipped(skipped: list[str]) -> None:
    model = host(Stem(nn.MaxPool2d((3,), 2)))
    accelerate_for_cpu(model, dtype="float32", skip_modules=skipped)
    assert isinstance(model["stage"], FusedResidualBlock) is not bool(skipped)


def test_what_is_written_between_two_chains_is_read() -> None:
    blocks = host(*(Block(64, 64) for _ in range(2)))["stage"]
    model, act, x = nn.ModuleDict({"stages": nn.ModuleList(blocks)}).eval(), nn.SiLU(inplace=True), image(64)

    def run(x: Tensor) -> Tensor:
        for stage in model["stages"]:
            x = act(stage(x))
        return x

    expected = run(x)
    accelerate_for_cpu(model, dtype="bfloat16")
    assert all(isinstance(stage, FusedResidualBlock) for stage in model["stages"])
    assert error(run(x), expected) <= TOLERANCES["bfloat16"]


def test_probing_leaves_no_trace() -> None:
    """Alone, the last convolution has nothing behind it; in the model it has."""
    model, _ = host(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3), nn.ReLU()), image()
    accelerate_for_cpu(model, dtype="float32")
    fused = model["stage"]
    assert isinstance(fused, FusedResidualBlock)
    assert [module.waits for module in fused[:2]] == [True, True]
    assert "compute" not in vars(fused[0])


def test_other_channels_are_refused_as_ever() -> None:
    model = host(Block(32, 32))
    accelerate_for_cpu(model, dtype="int8")
    with pytest.raises((RuntimeError, ValueError)):
        model["stage"](torch.randn(1, 31, 9, 9))


def test_convolutions_of_groups_are_no_links() -> None:
    model, x = host(Bottleneck(32, 32)), image()
    expected = model["stage"](x).detach()
    accelerate_for_cpu(model, dtype="int8")
    assert STRUCTURE not in explain(model).counts()
    assert error(model["stage"](x), expected) <= TOLERANCES["int8"]


def test_activations_in_front() -> None:
    """The first thing that happens to the input is no convolution."""
    model, x = host(Residual(32)), image()
    expected = model["stage"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(model["stage"](x), expected, atol=1e-4, rtol=1e-4)


def test_hooks_inside_see_what_they_would() -> None:
    model, x = host(Block(32, 32)), image()
    expected = model["stage"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    seen: list[Tensor] = []
    model["stage"][0].layer.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    torch.testing.assert_close(model["stage"](x), expected, atol=1e-4, rtol=1e-4)
    assert [tuple(tensor.shape) for tensor in seen] == [(2, 32, 11, 9)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copies_and_casts(dtype: str, duplicate: object) -> None:
    model, x = host(Block(32, 48)), image()
    accelerate_for_cpu(model, dtype=dtype)
    expected = model["stage"](x)
    other = duplicate(model)  # type: ignore[operator]
    assert isinstance(other["stage"], FusedResidualBlock)
    torch.testing.assert_close(other["stage"](x), expected, atol=1e-6, rtol=1e-5)
    other.bfloat16()
    output = other["stage"](x.bfloat16())
    assert output.dtype is torch.bfloat16
    assert error(output, expected) <= 0.05


def test_gradients_are_refused() -> None:
    model, x = host(Block(32, 32)), image()
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError, match="restore"):
        model["stage"](x.requires_grad_())


def test_too_small_an_image_is_refused_as_ever() -> None:
    model = host(nn.Conv2d(32, 32, 5), nn.Conv2d(32, 32, 5), nn.ReLU())
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError):
        model["stage"](torch.randn(1, 32, 3, 3))


@pytest.mark.parametrize(("ours", "serves"), [(1.0, True), (1.1, False), (1.3, False)])
def test_who_serves_is_a_question_of_time(monkeypatch: pytest.MonkeyPatch, ours: float, serves: bool) -> None:
    monkeypatch.setattr(providers, "_measured", lambda *args: {"own": ours, "oneDNN": 1.0})
    sample = providers.sample_of(64, many=False)
    assert providers.own_is_faster("float32", torch.float32, sample, tiled=False, joined=False) is serves
    joined = providers.own_is_faster("float32", torch.float32, sample, tiled=False, joined=True)
    assert joined is (ours < 1.15)
