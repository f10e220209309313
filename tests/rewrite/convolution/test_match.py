"""Convolutions on prepacked weights: the same values, the same visible weights, and restored."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers.convolution import works
from hf_cpu_accel.rewrite.convolution.match import OneDNNConvolution
from hf_cpu_accel.runtime import hardware

KINDS = {
    "plain": (3, 17, 3, {}),
    "strided": (8, 16, 3, {"stride": 2, "padding": 1}),
    "uneven": (16, 8, (5, 2), {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)}),
    "grouped": (16, 32, 3, {"groups": 4, "bias": False}),
    "depthwise": (16, 16, 3, {"groups": 16, "padding": 1}),
}


def model_of(kind: str) -> tuple[nn.Module, Tensor]:
    channels, out_channels, size, options = KINDS[kind]
    return nn.Sequential(nn.Conv2d(channels, out_channels, size, **options)).eval(), torch.randn(
        3, channels, 9, 12
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str, memory_format: torch.memory_format) -> None:
    model, x = model_of(kind)
    x = x.to(memory_format=memory_format)
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    (item,) = explain(model).replaced
    assert (item.op, item.dtype, item.provider) == ("convolution", "float32", "oneDNN")
    for input in (x, x[:1], x[1]):  # [C, H, W] is an image, too
        reference = expected[1] if input.dim() == 3 else expected[: len(input)]
        torch.testing.assert_close(model(input), reference, atol=1e-5, rtol=1e-5)
    restore(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("native", [False, *[True] * works(torch.bfloat16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: native)
    model, x = model_of("strided")
    expected, model, x = model(x).detach(), model.to(dtype), x.to(dtype)
    before = model(x).detach()
    accelerate_for_cpu(model, dtype="bfloat16")
    assert explain(model).replaced[0].dtype == ("bfloat16" if native else "float32")
    output = model(x)
    assert output.dtype is dtype
    torch.testing.assert_close(output.float(), expected, atol=0.03, rtol=0.03)
    restore(model)
    assert torch.equal(model(x), before)


def test_the_weight_is_still_there_to_the_outside() -> None:
    model, x = model_of("grouped")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    accelerate_for_cpu(model, dtype="float32")
    packed = model[0]
    assert isinstance(packed, OneDNNConvolution)
    assert (packed.weight.shape, packed.weight.dtype) == (weight.shape, torch.float32) or weight.numel() == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"restore\(model\)"):
        model.load_state_dict(state)
    restore(model)
    assert model[0].weight is weight
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own_weights(duplicate: object) -> None:
    model, x = model_of("plain")
    accelerate_for_cpu(model, dtype="float32")
    expected = model(x)
    other = duplicate(model)  # type: ignore[operator]
    restore(model)
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)


def test_a_model_may_be_cast_afterwards() -> None:
    model, x = model_of("plain")
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    model.bfloat16()
    output = model(x.bfloat16())
    assert output.dtype is model[0].weight.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel_size": 1}, "one pixel"),
        ({"kernel_size": 4, "padding": "same"}, "padding"),
        ({"padding": 1, "padding_mode": "reflect"}, "padding"),
    ],
)
def test_what_onednn_does_not_take_is_left_and_says_so(change: dict[str, object], reason: str) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, **{"kernel_size": 3, **change})).eval()  # type: ignore[arg-type]
    expected = model(x := torch.randn(1, 8, 5, 5)).detach()
    accelerate_for_cpu(model)
    (item,) = explain(model).left
    assert reason in (item.reason or "")
    assert torch.equal(model(x), expected)


def test_gradients_are_refused_in_words() -> None:
    model, x = model_of("plain")
    accelerate_for_cpu(model)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model(x.requires_grad_())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_a_plain_list_holds_too_keeps_its_weight(dtype: str) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(16, 16, 3)
            self.layers = [self.layer]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    model, x = Listed().eval(), torch.randn(1, 16, 5, 5)
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    assert any("plain Python list" in (item.reason or "") for item in explain(model).left)
    assert torch.equal(model(x), expected)
