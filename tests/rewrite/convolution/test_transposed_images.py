"""Transposed 2-d convolutions, compared with torch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.transposed.images import STRUCTURE, TransposedImages
from hf_cpu_accel.rewrite.convolution.transposed.windows import as_kernel, as_windows
from hf_cpu_accel.runtime import hardware
from tests.rewrite.convolution.test_as_linear import BOUNDS, Holder


def _cases() -> dict[str, nn.ConvTranspose2d]:
    """Return cases with the same weights in every run, independent of imports: in some draws the worst pixel is near its bound."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "squares": nn.ConvTranspose2d(64, 24, 2, 2),
            "overlapping squares": nn.ConvTranspose2d(32, 24, 4, 2, padding=1),
            "no whole number of strides": nn.ConvTranspose2d(
                20, 17, (3, 5), (2, 3), padding=(1, 2), output_padding=1
            ),
            "gaps between kernels": nn.ConvTranspose2d(64, 16, 2, 5, bias=False),
            "one side": nn.ConvTranspose2d(128, 16, (2, 4), (2, 3), padding=(0, 1)),
        }


CASES = _cases()


def _pictures(layer: nn.ConvTranspose2d) -> Tensor:
    return torch.randn(2, layer.in_channels, 5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_transposed_convolutions_in_int8(case: str, threads: int) -> None:
    layer = CASES[case]
    eager = Holder(copy.deepcopy(layer)).eval()
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype="int8")
    assert explain(model).counts() == {STRUCTURE: 1}
    pictures = _pictures(layer)
    last = pictures.contiguous(memory_format=torch.channels_last)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for given in (pictures, last, pictures[:1, :, ::2], pictures[:, :, :1, :1], pictures.bfloat16()):
        ours, theirs = model(given), eager(given.float())
        assert ours.shape == theirs.shape
        assert ours.dtype is given.dtype
        assert ours.is_contiguous(memory_format=torch.channels_last)
        assert row_error(ours.float().movedim(1, -1), theirs.movedim(1, -1)) <= BOUNDS["int8"]
    torch.set_num_threads(before)
    ours = model(pictures)
    assert torch.equal(model(last), ours)
    assert torch.equal(model(pictures[0]), model(pictures[:1])[0])
    assert torch.equal(pickle.loads(pickle.dumps(model))(pictures), ours)
    assert torch.equal(copy.deepcopy(model)(pictures), ours)
    restore(model)
    assert torch.equal(model(pictures), eager(pictures))


@pytest.mark.parametrize("case", CASES)
def test_the_weight_is_told_as_it_was(case: str) -> None:
    layer = CASES[case]
    exact = TransposedImages(layer, "float32")
    assert torch.equal(exact.unpack(), layer.weight)
    assert exact.weight_shape == tuple(layer.weight.shape)
    model = Holder(copy.deepcopy(layer)).eval()
    names = list(model.state_dict())
    accelerate_for_cpu(model, dtype="int8")
    state = model.state_dict()
    assert list(state) == names
    error = row_error(state["inner.weight"].flatten(1), layer.weight.detach().flatten(1))
    assert error <= BOUNDS["int8"]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_transposed_convolutions_in_bfloat16(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU multiplies in it; elsewhere torch's own is as fast."""
    layer = CASES[case]
    eager, pictures = Holder(copy.deepcopy(layer)).eval(), _pictures(layer)
    for fast, counted in ((True, {STRUCTURE: 1}), (False, {})):
        monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda fast=fast: fast)
        model = copy.deepcopy(eager).bfloat16()
        accelerate_for_cpu(model, dtype="bfloat16")
        assert explain(model).counts() == counted
        output = model(pictures.bfloat16())
        assert output.dtype is torch.bfloat16
        assert row_error(output.float().movedim(1, -1), eager(pictures).movedim(1, -1)) <= 2e-2


@torch.no_grad()
def test_a_written_bias_is_read() -> None:
    model = Holder(copy.deepcopy(CASES["squares"])).eval()
    accelerate_for_cpu(model, dtype="int8")
    pictures = _pictures(CASES["squares"])
    before = model(pictures)
    model.inner.bias.add_(1)
    torch.testing.assert_close(model(pictures), before + 1)


@torch.no_grad()
def test_a_transposed_convolution_takes_what_torch_takes() -> None:
    layer = CASES["overlapping squares"]
    model = Holder(copy.deepcopy(layer)).eval()
    accelerate_for_cpu(model, dtype="int8")
    pictures = _pictures(layer)
    expected = layer(pictures, output_size=[11, 15])
    assert expected.shape[2:] == (11, 15)
    ours = model.inner(pictures, output_size=[11, 15])
    assert row_error(ours.movedim(1, -1), expected.movedim(1, -1)) <= BOUNDS["int8"]
    with pytest.raises(ValueError, match="output_size"):
        model.inner(pictures, output_size=[12, 15])
    for wrong in (pictures[:, :-1], pictures[..., :0], pictures[None]):
        with pytest.raises(RuntimeError, match="is not supported: expected"):
            model(wrong)
    with pytest.raises(RuntimeError, match=r"torch\.float64"):
        model(pictures.double())


@torch.no_grad()
def test_weight_norm_is_computed_once() -> None:
    eager = Holder(weight_norm(copy.deepcopy(CASES["squares"]))).eval()
    model, pictures = copy.deepcopy(eager), _pictures(CASES["squares"])
    accelerate_for_cpu(model, dtype="int8")
    assert explain(model).counts() == {STRUCTURE: 1}
    assert list(model.state_dict()) == list(eager.state_dict())
    assert row_error(model(pictures).movedim(1, -1), eager(pictures).movedim(1, -1)) <= BOUNDS["int8"]
    restore(model)
    assert torch.equal(model(pictures), eager(pictures))


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (nn.ConvTranspose2d(64, 64, 2, 2), "float32", "PyTorch's kernel is as fast in float32"),
        (nn.ConvTranspose2d(64, 64, 2, 2, groups=2), "int8", "groups=2"),
        (nn.ConvTranspose2d(64, 64, 2, 2, dilation=2), "int8", "dilation=(2, 2)"),
        (nn.ConvTranspose2d(2, 64, 2, 2), "int8", "too few"),
        (nn.ConvTranspose2d(64, 64, 3), "int8", "PyTorch's kernel is faster"),
        (nn.ConvTranspose2d(64, 64, 5, 2), "int8", "PyTorch's kernel is faster"),
        (nn.ConvTranspose2d(64, 64, 2, 2, output_padding=1), "int8", "output_padding=(1, 1)"),
    ],
)
@torch.no_grad()
def test_others_are_left(layer: nn.ConvTranspose2d, dtype: str, reason: str) -> None:
    eager = Holder(copy.deepcopy(layer)).eval()
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype=dtype)
    (item,) = (item for item in explain(model).items if item.reason is not None)
    assert reason in item.reason
    pictures = _pictures(layer)
    assert torch.equal(model(pictures), eager(pictures))


def test_each_square_of_the_output_is_a_pixel_of_the_other() -> None:
    weight = torch.randn(3, 5, 4, 3)
    windows = as_windows(weight, (2, 2))
    assert windows.shape == (20, 3, 2, 2)
    assert torch.equal(as_kernel(windows, (4, 3), (2, 2)), weight)
    # The last pixel of two gives the first half of a kernel.
    assert torch.equal(windows[:5, :, 1, 1], weight[:, :, 0, 0].T)
    assert torch.equal(windows[15:, :, 0, 0], torch.zeros(5, 3))  # behind the kernel's third column
    assert torch.equal(windows[10:15, :, 0, 0], weight[:, :, 3, 2].T)
