"""Convolutions by the GEMM of this package: close to float32, with a visible weight, and restored."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution import gemm
from hf_cpu_accel.rewrite.convolution.gemm import GemmConvolution
from hf_cpu_accel.runtime import hardware

KINDS = {
    "plain": (16, 17, 3, {}),
    "strided": (32, 16, 3, {"stride": 2, "padding": 1, "bias": False}),
    "uneven": (16, 24, (5, 2), {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)}),
}


def model_of(kind: str) -> tuple[nn.Module, Tensor]:
    channels, out_channels, size, options = KINDS[kind]
    layer = nn.Conv2d(channels, out_channels, size, **options)
    return nn.Sequential(layer).eval(), torch.randn(3, channels, 9, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_the_way_back(kind: str, weights: str, dtype: torch.dtype) -> None:
    model, x = model_of(kind)
    truth = model(x).detach()
    model, x = model.to(dtype), x.to(dtype)
    before = model(x).detach()
    accelerate_for_cpu(model, dtype=weights)
    assert isinstance(model[0], GemmConvolution)
    (item,) = explain(model).replaced
    assert (item.op, item.dtype) == ("conv2d", "int8")
    for input in (x, x[:1], x[1], x.contiguous(memory_format=torch.channels_last)):
        output = model(input)
        assert output.dtype is dtype
        expected = truth[1] if input.dim() == 3 else truth[: len(input)]
        assert (output - expected).norm() <= 0.03 * expected.norm()
    restore(model)
    assert torch.equal(model(x), before)


def test_the_weight_is_still_there_to_the_outside() -> None:
    model, x = model_of("plain")
    weight, bias = model[0].weight, model[0].bias
    exact = weight.detach().clone()
    accelerate_for_cpu(model, dtype="int8")
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.bias"]
    assert state["0.weight"].shape == exact.shape
    assert (state["0.weight"] - exact).abs().max() <= 0.02 * exact.abs().max()
    assert model[0].bias is bias
    model.bfloat16()
    assert model(x.bfloat16()).dtype is model[0].weight.dtype is torch.bfloat16
    restore(model)
    assert model[0].weight is weight
    assert torch.equal(weight.float(), exact.bfloat16().float())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own_weights(duplicate: object) -> None:
    model, x = model_of("plain")
    accelerate_for_cpu(model, dtype="int8")
    expected = model(x)
    other = duplicate(model)  # type: ignore[operator]
    restore(model)
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_patches_of_many_channels_are_gathered_as_they_are_packed(weights: str) -> None:
    """Those between the stages of ConvNeXt or SegFormer: in every dtype, and nothing is measured for that."""
    model, x = nn.Sequential(nn.Conv2d(32, 48, 2, stride=2)).eval(), torch.randn(2, 32, 9, 12)
    truth = model(x).detach()
    accelerate_for_cpu(model, dtype=weights)
    assert isinstance(model[0], GemmConvolution)
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        assert (model(image) - truth).norm() <= {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.03}[
            weights
        ] * truth.norm()
    restore(model)
    assert torch.equal(model(x), truth)


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "MANY_WEIGHTS", 16 * 17 * 9)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8-weight"])
def test_many_weights_in_floating_point_are_ours(
    weights: str, dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those in bfloat16 where the CPU computes it faster."""
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: fast)
    model, x = model_of("plain")
    truth = model(x).detach()
    model, x = model.to(dtype), x.to(dtype)
    before = model(x).detach()
    accelerate_for_cpu(model, dtype=weights)
    ours = weights == "float32" or (weights == "bfloat16" and not fast)
    assert isinstance(model[0], GemmConvolution) == ours
    if ours:
        (item,) = explain(model).replaced
        assert (item.op, item.dtype) == ("conv2d", weights)
    error = 1e-5 if weights == "float32" and dtype is torch.float32 else 0.01
    assert (model(x) - truth).norm() <= error * truth.norm()
    restore(model)
    assert torch.equal(model(x), before)


@pytest.mark.usefixtures("few_are_many")
def test_fewer_weights_and_those_with_a_norm_are_onednns() -> None:
    few, many = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 17, 3)
    model = nn.ModuleList([few, nn.Sequential(many, nn.BatchNorm2d(17))]).eval()
    accelerate_for_cpu(model, dtype="float32")
    assert not any(isinstance(module, GemmConvolution) for module in model.modules())


def test_images_groups_and_odd_padding_are_not_quantized() -> None:
    layers = [
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 3, 3),
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 4, padding="same"),
    ]
    model = nn.ModuleList(layers).eval()
    accelerate_for_cpu(model, dtype="int8")
    assert not any(isinstance(layer, GemmConvolution) for layer in model)


def test_wrong_channels_and_gradients_are_refused_in_words() -> None:
    model, x = model_of("plain")
    accelerate_for_cpu(model, dtype="int8")
    with pytest.raises(ValueError, match="with 16 channels"):
        model(x[:, :5])
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model(x.requires_grad_())
