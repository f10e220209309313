"""Convolutions over time with gaps, beside torch's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.image_of_time import STRUCTURE, ConvolutionOverTime
from hf_cpu_accel.rewrite.core.verify import row_error
from tests.rewrite.convolution.test_as_linear import BOUNDS, Holder

CASES = {
    "as vocoders have it": (nn.Conv1d(32, 32, 7, padding=9, dilation=3), 41),
    "whole lines": (nn.Conv1d(64, 64, 3, padding=5, dilation=5), 23),
    "odd sides": (nn.Conv1d(17, 33, 4, padding=2, dilation=2, bias=False), 30),
    "words": (nn.Conv1d(20, 16, 3, padding="same", dilation=9), 12),
    "strides": (nn.Conv1d(16, 40, 2, stride=3, dilation=4), 19),
}


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
        with pytest.raises(RuntimeError, match="this convolution takes"):
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
