"""Dilated 1-d convolutions, compared with torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.as_linear import OVER_TIME
from hf_cpu_accel.rewrite.convolution.image_of_time import STRUCTURE, ConvolutionOverTime
from hf_cpu_accel.runtime import hardware
from tests.rewrite.convolution.test_as_linear import BOUNDS, Holder

CASES = {
    "as vocoders have it": (nn.Conv1d(32, 32, 7, padding=9, dilation=3), 41),
    "whole lines": (nn.Conv1d(64, 64, 3, padding=5, dilation=5), 23),
    "odd sides": (nn.Conv1d(17, 33, 4, padding=2, dilation=2, bias=False), 30),
    "words": (nn.Conv1d(20, 16, 3, padding="same", dilation=9), 12),
    "many channels": (nn.Conv1d(80, 96, 5, padding=6, dilation=3), 26),
    "strides": (nn.Conv1d(16, 40, 2, stride=3, dilation=4), 19),
}


@pytest.fixture(autouse=True)
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere such layers stay in float32, or are left."""
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: True)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_values(case: str, dtype: str, threads: int) -> None:
    layer, length = CASES[case]
    eager = Holder(copy.deepcopy(layer)).eval()
    model = Holder(copy.deepcopy(layer)).eval()
    torch.manual_seed(0)
    sound = torch.randn(3, layer.in_channels, 2 * length)
    model.inner = ConvolutionOverTime(model.inner, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for given in (sound[:, :, :length], sound[:1, :, ::2], sound.mT.contiguous().mT):
        assert row_error(model(given).mT, eager(given).mT) <= BOUNDS[dtype]
    torch.set_num_threads(before)
    output = model(sound.mT.contiguous().mT)
    assert output.mT.is_contiguous()
    assert torch.equal(model(sound[0]), model(sound[:1])[0])
    narrow = model(sound.bfloat16())
    assert narrow.dtype is torch.bfloat16
    assert row_error(narrow.float().mT, eager(sound).mT) <= 2e-2 + BOUNDS[dtype]
    for wrong in (sound[:, :-1], sound[:, :, :1][..., :0], sound[None]):
        with pytest.raises(RuntimeError, match="is not supported: expected"):
            model(wrong)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_way_back(case: str) -> None:
    layer, length = CASES[case]
    model = Holder(copy.deepcopy(layer)).eval()
    original, sound = model.inner, torch.randn(2, layer.in_channels, length)
    expected, weight = model(sound), model.inner.weight.clone()
    accelerate_for_cpu(model, dtype="int8")
    assert explain(model).counts() == {STRUCTURE: 1}
    assert torch.equal(pickle.loads(pickle.dumps(model))(sound), model(sound))
    assert torch.equal(copy.deepcopy(model)(sound), model(sound))
    state = model.state_dict()
    assert list(state) == [f"inner.{name}" for name, _ in layer.named_parameters()]
    assert row_error(state["inner.weight"].flatten(1), weight.flatten(1)) <= BOUNDS["int8"]
    restore(model)
    assert model.inner is original
    assert torch.equal(model(sound), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(32, 32, 3, dilation=2, groups=32),
        nn.Conv1d(32, 32, 3, dilation=2, padding_mode="circular", padding=2),
        nn.Conv1d(8, 32, 3, dilation=2),
        nn.Conv1d(32, 8, 3, dilation=2),
        nn.Conv1d(32, 32, 4, dilation=3, padding="same"),
    ],
    ids=str,
)
@torch.no_grad()
def test_others_are_left(layer: nn.Module) -> None:
    model = Holder(copy.deepcopy(layer)).eval()
    accelerate_for_cpu(model, dtype="int8")
    (item,) = explain(model).items
    assert item.reason is not None
    assert type(model.inner) is nn.Conv1d


class Vocoder(nn.Module):
    """Residual blocks in a list, as HiFi-GAN (Kong et al. 2020, arXiv:2010.05646) has them."""

    def __init__(self, channels: int, *, normed: bool = False) -> None:
        super().__init__()
        made = (nn.Conv1d(channels, channels, 3, padding=gap, dilation=gap) for gap in (1, 3, 5))
        self.layers = nn.ModuleList(
            nn.Sequential(layer, *[nn.BatchNorm1d(channels)] * normed) for layer in made
        )

    def forward(self, sound: Tensor) -> Tensor:
        for layer in self.layers:
            sound = sound + layer(functional.leaky_relu(sound, 0.1))
        return sound


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("channels", [32, 64, 96])
@torch.no_grad()
def test_a_row_of_layers(channels: int, dtype: str) -> None:
    torch.manual_seed(0)
    model = Holder(Vocoder(channels)).eval()
    sound = torch.randn(2, channels, 50)
    expected = model(sound)
    accelerate_for_cpu(model, dtype=dtype)
    told = explain(model).counts()
    assert told == ({STRUCTURE: 3} if dtype == "float32" else {STRUCTURE: 2, OVER_TIME: 1})
    output = model(sound)
    assert row_error(output.mT, expected.mT) <= 2 * BOUNDS[dtype]
    assert torch.equal(copy.deepcopy(model)(sound), output)
    assert torch.equal(pickle.loads(pickle.dumps(model))(sound), output)
    restore(model)
    assert torch.equal(model(sound), expected)


def test_in_float32_norms_and_lone_ones_are_left() -> None:
    for model in (Holder(Vocoder(32, normed=True)), Holder(nn.Conv1d(32, 32, 3, dilation=3))):
        accelerate_for_cpu(model.eval(), dtype="float32")
        assert not explain(model).counts()
