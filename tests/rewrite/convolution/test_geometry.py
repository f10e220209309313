"""String paddings, and convolution classes that hosts derive from torch's."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution, symmetric_padding


class Depthwise(nn.Conv2d):
    """Made otherwise, computed as torch's."""

    def __init__(self, channels: int, size: int, **options: object) -> None:
        super().__init__(channels, channels, size, groups=channels, **options)  # type: ignore[arg-type]


class Standardized(nn.Conv2d):
    """Computed otherwise."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(input, weight, self.bias, self.stride, self.padding)


CONVOLUTIONS = {
    "same": nn.Conv2d(16, 32, 3, padding="same"),
    "same, with gaps": nn.Conv2d(16, 32, 3, padding="same", dilation=2),
    "same, odd and even": nn.Conv2d(16, 32, (4, 3), padding="same", dilation=(2, 1)),
    "same, one pixel": nn.Conv2d(16, 32, 1, padding="same"),
    "valid": nn.Conv2d(16, 32, 3, 2, padding="valid"),
    "depthwise": Depthwise(16, 5, padding="same"),
    "over time": nn.Conv1d(16, 32, 3, padding="same"),
    "video": nn.Conv3d(16, 32, (1, 2, 2), (1, 2, 2), padding="valid"),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@torch.no_grad()
def test_padding_in_words_is_that_in_numbers(kind: str, dtype: str) -> None:
    convolution = CONVOLUTIONS[kind]
    model = nn.Sequential(convolution).eval()
    x = torch.randn(2, 16, *[8 + number for number in range(len(convolution.kernel_size))])
    expected = model(x)
    accelerate_for_cpu(model, dtype=dtype)
    is_left = kind == "over time" and dtype == "float32"  # oneDNN's own is as fast
    assert bool(explain(model).replaced) is not is_left
    for _ in range(2):
        output = model(x)
        assert output.shape == expected.shape
        assert (output - expected).norm() <= (1e-5 if dtype == "float32" else 0.05) * expected.norm()
    restore(model)
    assert model[0] is convolution
    assert torch.equal(model(x), expected)


def test_zeros_on_one_side_are_none_on_either() -> None:
    assert symmetric_padding(nn.Conv2d(8, 8, 4, padding="same")) is None
    assert symmetric_padding(nn.Conv2d(8, 8, (4, 3), padding="same", dilation=(2, 1))) == (3, 1)
    assert symmetric_padding(nn.Conv1d(8, 8, 3, padding=2)) == (2,)


@torch.no_grad()
def test_what_computes_otherwise_is_left() -> None:
    assert is_convolution(Depthwise(8, 3), nn.Conv2d)
    assert not is_convolution(Standardized(8, 8, 3), nn.Conv2d)
    assert not is_convolution(nn.Conv1d(8, 8, 3), nn.Conv2d)
    model = nn.Sequential(Standardized(32, 32, 3)).eval()
    expected = model(x := torch.randn(1, 32, 6, 6))
    accelerate_for_cpu(model, dtype="int8")
    assert not explain(model).replaced
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_norm_behind_such_a_convolution_is_folded() -> None:
    layers = [Depthwise(16, 3, padding="same", bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    model = nn.Sequential(nn.Sequential(*layers)).eval()
    model[0][1].running_var.uniform_(0.5, 2)
    expected = model(x := torch.randn(2, 16, 7, 6))
    accelerate_for_cpu(model, dtype="float32")
    assert "batch norm, folded" in explain(model).counts()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
