"""ConvNeXt's blocks: depthwise convolution, norm, feed-forward network, gain and residual."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.convnext_block import FusedConvolutionBlock

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05}


class Block(nn.Module):
    """A gain as small as at the start of training hides the branch of a block."""

    def __init__(self, *, gain: float | None = 1e-6, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm = nn.LayerNorm(32, eps=1e-6)
        self.up, self.act, self.down = nn.Linear(32, 128), act(), nn.Linear(128, 32)
        self.gain = None if gain is None else nn.Parameter(torch.full((32,), gain))
        self.drop_path = nn.Identity()

    def branch(self, x: Tensor) -> Tensor:
        rows = self.norm(self.convolution(x).permute(0, 2, 3, 1))
        rows = self.down(self.act(self.up(rows)))
        return (rows if self.gain is None else self.gain * rows).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.branch(x))


class Normalized(Block):
    """As ConvNeXt v2, with a response normalization that the parts do not tell of."""

    def branch(self, x: Tensor) -> Tensor:
        rows = self.act(self.up(self.norm(self.convolution(x).permute(0, 2, 3, 1))))
        return self.down(rows / rows.norm(dim=(1, 2), keepdim=True)).permute(0, 3, 1, 2)


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x)


def model_of(block: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(block).eval(), torch.randn(2, 32, 9, 8)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("gain", [None, 1e-6, 0.7])
def test_values_and_the_way_back(gain: float | None, dtype: str) -> None:
    model, x = model_of(Block(gain=gain))
    original, expected = model[0], model(x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["convolution block"] == 1
    assert isinstance(model[0], FusedConvolutionBlock)
    assert isinstance(model[0], Block)
    for input in (x, x[:1], x.contiguous(memory_format=torch.channels_last)):
        output, reference = model(input), expected[: len(input)]
        assert type(output) is Tensor
        assert (output - reference).norm() <= TOLERANCES[dtype] * (reference - x[: len(input)]).norm() + 1e-5
    restore(model)
    assert model[0] is original
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("block", [Normalized(gain=None), WithoutResidual(), Block(act=nn.Mish)])
def test_what_computes_something_else_is_left(block: nn.Module) -> None:
    model, x = model_of(block)
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert "convolution block" not in explain(model).counts()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_hooks_inside_see_what_they_would() -> None:
    model, x = model_of(Block(gain=0.5))
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    seen: list[tuple[int, ...]] = []
    model[0].up.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert seen == [(2, 9, 8, 128)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copies_and_casts(dtype: str, duplicate: object) -> None:
    model, x = model_of(Block(gain=0.5))
    accelerate_for_cpu(model, dtype=dtype)
    expected = model(x)
    other = duplicate(model)  # type: ignore[operator]
    assert isinstance(other[0], FusedConvolutionBlock)
    torch.testing.assert_close(other(x), expected, atol=1e-6, rtol=1e-5)
    other.bfloat16()
    output = other(x.bfloat16())
    assert output.dtype is torch.bfloat16
    assert (output - expected).norm() <= 0.03 * expected.norm()


def test_skipped_parts_keep_the_block_apart() -> None:
    model, x = model_of(Block())
    expected = model(x).detach()
    accelerate_for_cpu(model, skip_modules=["0.up"])
    assert "convolution block" not in explain(model).counts()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
