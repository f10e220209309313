"""Residual blocks and whole stages in one call; other modules keep their own forward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers import convolution as providers
from hf_cpu_accel.rewrite.convolution.residual_block import STRUCTURE, FusedResidualBlock
from tests.rewrite.convolution.convolution_blocks import Bottleneck, Residual, with_statistics
from tests.rewrite.convolution.residual_blocks import (
    TOLERANCES,
    Block,
    Clamped,
    Damped,
    InPlace,
    Scaled,
    Squeezed,
    Widened,
    error,
    host,
    image,
)

pytestmark = pytest.mark.usefixtures("ours_serve")


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


def test_convolutions_of_groups_that_fill_no_vectors_are_no_links() -> None:
    model, x = host(Bottleneck(32, 24)), image()
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
    assert providers.native_is_faster("float32", torch.float32, sample, tiled=False, joined=False) is serves
    joined = providers.native_is_faster("float32", torch.float32, sample, tiled=False, joined=True)
    assert joined is (ours < 1.15)
