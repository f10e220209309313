"""Transposed 1-d convolutions, padding around 1-d convolutions, and codecs of both, compared with torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.over_time import STRUCTURE as PADDED
from hf_cpu_accel.rewrite.convolution.over_time import WAITING, _pad
from hf_cpu_accel.rewrite.convolution.sound import DeferredELU
from hf_cpu_accel.rewrite.convolution.transposed.over_time import STRUCTURE as TRANSPOSED
from tests.rewrite.convolution.test_as_linear import BOUNDS, Holder

CASES = {
    "as codecs have it": (nn.ConvTranspose1d(32, 24, 8, 4), 13),
    "no whole number of strides": (nn.ConvTranspose1d(20, 17, 7, 3, padding=2), 9),
    "every step": (nn.ConvTranspose1d(16, 33, 5, bias=False), 6),
    "gaps between kernels": (nn.ConvTranspose1d(17, 16, 2, 5), 4),
    "one step": (nn.ConvTranspose1d(64, 16, 4, 2, padding=1), 1),
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_transposed_convolutions(case: str, dtype: str, threads: int) -> None:
    layer, length = CASES[case]
    eager = Holder(copy.deepcopy(layer)).eval()
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts() == {TRANSPOSED: 1}
    sound = torch.randn(3, layer.in_channels, 2 * length)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for given in (sound[:, :, :length], sound[:1, :, ::2], sound.mT.contiguous().mT):
        assert row_error(model(given).mT, eager(given).mT) <= BOUNDS[dtype]
    torch.set_num_threads(before)
    ours = model(sound)
    assert torch.equal(model(sound[0]), model(sound[:1])[0])
    assert torch.equal(pickle.loads(pickle.dumps(model))(sound), ours)
    assert torch.equal(copy.deepcopy(model)(sound), ours)
    if dtype == "float32":
        assert torch.equal(model.inner.weight, eager.inner.weight)
        assert torch.equal(model.state_dict()["inner.weight"], eager.inner.weight)
    restore(model)
    assert torch.equal(model(sound), eager(sound))


@torch.no_grad()
def test_transposed_convolutions_in_bfloat16() -> None:
    layer, length = CASES["as codecs have it"]
    eager = Holder(copy.deepcopy(layer)).eval()
    model = copy.deepcopy(eager).bfloat16()
    accelerate_for_cpu(model, dtype="bfloat16")
    sound = torch.randn(2, layer.in_channels, length).bfloat16()
    output = model(sound)
    assert output.dtype is torch.bfloat16
    assert row_error(output.float().mT, eager(sound.float()).mT) <= 2e-2


@torch.no_grad()
def test_a_transposed_convolution_takes_what_torch_takes() -> None:
    layer, length = CASES["as codecs have it"]
    model = Holder(copy.deepcopy(layer)).eval()
    accelerate_for_cpu(model, dtype="float32")
    sound = torch.randn(2, layer.in_channels, length)
    longest = 4 * length + 7
    expected = layer(sound, output_size=[longest])
    assert expected.shape[-1] == longest
    torch.testing.assert_close(model.inner(sound, output_size=[longest]), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="output_size"):
        model.inner(sound, output_size=[longest + 1])
    for wrong in (sound[:, :-1], sound[..., :0], sound[None]):
        with pytest.raises(RuntimeError, match="is not supported: expected"):
            model(wrong)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.ConvTranspose1d(32, 32, 4, 2, groups=2), "groups=2"),
        (nn.ConvTranspose1d(32, 32, 4, 2, output_padding=1), "output_padding=(1,)"),
        (nn.ConvTranspose1d(32, 32, 4, 2, dilation=2), "dilation=(2,)"),
        (nn.ConvTranspose1d(2, 32, 4, 2), "too few"),
    ],
)
def test_other_transposed_convolutions_are_left(layer: nn.Module, reason: str) -> None:
    model = Holder(copy.deepcopy(layer)).eval()
    accelerate_for_cpu(model, dtype="float32")
    (item,) = (item for item in explain(model).items if item.reason is not None)
    assert reason in item.reason


class Causal(nn.Module):
    """Zeros before, as a codec puts them there."""

    def __init__(self, *sizes: int, value: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(*sizes)
        self.value = value

    def forward(self, sound: Tensor) -> Tensor:
        before = self.conv.kernel_size[0] - self.conv.stride[0]
        return self.conv(functional.pad(sound, (before, 1), value=self.value))


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Causal(1, 32, 7), nn.ELU(), Causal(32, 64, 8, 4), Causal(64, 64, 3, value=0.5)]
        )
        self.back = nn.ModuleList([nn.ConvTranspose1d(64, 32, 8, 4), nn.ELU(), Causal(32, 1, 3)])

    def forward(self, sound: Tensor) -> Tensor:
        for layer in (*self.layers, *self.back):
            sound = layer(sound)
        return sound


@pytest.mark.parametrize("dtype", BOUNDS)
@torch.no_grad()
def test_a_codec(dtype: str) -> None:
    torch.manual_seed(0)
    eager = Codec().eval()
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()[PADDED] == 4
    sound = torch.randn(2, 1, 203)
    before = eager(sound)
    assert row_error(model(sound), before) <= BOUNDS[dtype]
    assert torch.equal(pickle.loads(pickle.dumps(model))(sound), model(sound))
    restore(model)
    assert torch.equal(model(sound), before)


def test_padding_keeps_the_channels_last() -> None:
    rows = torch.randn(2, 9, 5)
    sound = rows.mT
    for pads, value in (((3, 0), None), ((0, 2), 0.25), ((1, 4), -1.0), ((0, 0), None)):
        padded = _pad(sound, pads, value=value)
        assert padded is not None
        assert padded.mT.is_contiguous()
        assert torch.equal(padded, functional.pad(sound, pads, value=value))
    for pads in ((3, 0), (0, 2), (8, 8)):
        mirrored = _pad(sound, pads, "reflect", 0.0)
        assert mirrored is not None
        assert mirrored.mT.is_contiguous()
        assert torch.equal(mirrored, functional.pad(sound, pads, mode="reflect"))
    for others in (sound.contiguous(), rows[0], torch.randn(2, 3, 4, 5)):
        assert _pad(others, (1, 1)) is None
    assert _pad(sound, (-1, 0)) is None
    assert _pad(sound, (1, 1), "replicate") is None
    assert _pad(sound, (9, 1), "reflect") is None
    assert _pad(sound, (1, 1, 1, 1)) is None


@torch.no_grad()
def test_elus_wait_for_a_convolution_or_give_their_values() -> None:
    torch.manual_seed(0)
    model = Codec().eval()
    elu = nn.ELU(alpha=0.7).eval()
    model.layers[1] = elu
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts()[WAITING] == 2
    sound = torch.randn(2, 9, 32).mT
    waiting = model.layers[1](sound)
    assert isinstance(waiting, DeferredELU)
    assert waiting.stride() == sound.stride()
    expected = elu(sound)
    torch.testing.assert_close(model.layers[2](waiting), eager.layers[2](expected), rtol=1e-4, atol=1e-5)
    assert waiting._tensor is None  # written where it is read
    before = model.back[1](torch.randn(2, 9, 64).mT)
    assert isinstance(before, DeferredELU)
    output = model.back[0](before)
    assert before._tensor is None
    torch.testing.assert_close(output, eager.back[0](before.tensor), rtol=1e-4, atol=1e-5)
    waiting = model.layers[1](sound)
    assert torch.equal(waiting + 0, elu(sound))
    torch.testing.assert_close(model.layers[2](waiting), eager.layers[2](elu(sound)), rtol=1e-4, atol=1e-5)
    waiting = model.layers[1](sound)
    sound.add_(1)
    with pytest.raises(RuntimeError, match="was written to"):
        model.layers[2](waiting)
    for others in (sound.contiguous(), sound[0]):
        assert torch.equal(model.layers[1](others), elu(others))
