"""A stem with its pooling in one call, and poolings that stay with torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from tests.rewrite.convolution.residual_blocks import TOLERANCES, Stem, error, host, image

pytestmark = pytest.mark.usefixtures("ours_serve")


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
        nn.AvgPool2d(3, 2, ceil_mode=True),
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
