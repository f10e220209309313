"""Convolutions that are linears over a view of their input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.as_linear import OVER_TIME, PATCHES, PIXELS

BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}
PATCH_CASES = {
    "image": (nn.Conv2d(3, 48, 8, 8), (3, 32, 40)),
    "what is left over": (nn.Conv2d(3, 33, (4, 8), (4, 8), bias=False), (3, 19, 23)),
    "video": (nn.Conv3d(3, 64, (2, 4, 4), (2, 4, 4), padding="valid"), (3, 4, 8, 9)),
}
PIXEL_CASES = {
    "each": (nn.Conv2d(32, 48, 1), (32, 7, 9)),
    "every second": (nn.Conv2d(20, 33, 1, stride=2, bias=False), (20, 7, 8)),
}
TIME_CASES = {
    "strided": (nn.Conv1d(32, 48, 3, stride=2, bias=False), (32, 41)),
    "padded": (nn.Conv1d(20, 33, 3, padding=1), (20, 17)),
    "one step": (nn.Conv1d(32, 64, 1), (32, 5)),
    "gaps": (nn.Conv1d(16, 32, 2, stride=5), (16, 23)),
    "sound": (nn.Conv1d(1, 32, 10, stride=5), (1, 83)),
}


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def holder(module: nn.Module) -> nn.Module:
    return Holder(copy.deepcopy(module)).eval()


def check(model: nn.Module, x: Tensor, dtype: str, structure: str, bound: float) -> None:
    before, weight = model(x), model.inner.weight.clone()
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts() == {structure: 1}
    error = row_error(model(x).movedim(1, -1), before.movedim(1, -1))
    assert error <= bound
    assert torch.equal(model(x[0]), model(x[:1])[0])
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    state = model.state_dict()
    assert (
        list(state) == [f"inner.{name}" for name, _ in model.inner.named_parameters()]
        or "inner.weight" in state
    )
    for seen in (state["inner.weight"], model.inner.weight):
        assert seen.shape == weight.shape
        assert row_error((seen + 0).flatten(1), weight.flatten(1)) <= bound
    restore(model)
    assert torch.equal(model.inner.weight, weight)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PATCH_CASES)
@torch.no_grad()
def test_patches(case: str, dtype: str) -> None:
    module, shape = PATCH_CASES[case]
    check(holder(module), torch.randn(2, *shape), dtype, PATCHES, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PIXEL_CASES)
@torch.no_grad()
def test_pixels(case: str, dtype: str) -> None:
    module, shape = PIXEL_CASES[case]
    for x in (torch.randn(2, *shape), torch.randn(2, *shape).to(memory_format=torch.channels_last)):
        check(holder(module), x, dtype, PIXELS, BOUNDS[dtype])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", TIME_CASES)
@torch.no_grad()
def test_over_time(case: str, batch: int) -> None:
    module, shape = TIME_CASES[case]
    check(holder(module), torch.randn(batch, *shape), "int8", OVER_TIME, BOUNDS["int8"])


@torch.no_grad()
def test_one_after_the_other_without_a_copy() -> None:
    """As feature extractors of speech models have them: what one gives lies as the next one reads it."""
    torch.manual_seed(0)
    model = Holder(
        nn.Sequential(nn.Conv1d(32, 48, 3, 2), nn.GELU(), nn.Conv1d(48, 64, 2, 2), nn.GELU())
    ).eval()
    x = torch.randn(1, 32, 100)
    before = model(x)
    accelerate_for_cpu(model, dtype="int8")
    assert explain(model).counts() == {OVER_TIME: 2}
    assert model.inner[1](model.inner[0](x)).transpose(1, 2).is_contiguous()
    assert row_error(model(x), before) <= 0.06


def test_others_are_left() -> None:
    torch.manual_seed(0)
    others = {
        "overlapping": nn.Conv2d(3, 32, 4, 2),
        "padded": nn.Conv2d(3, 32, 4, 4, padding=1),
        "dilated": nn.Conv2d(3, 32, 4, 4, dilation=2),
        "in groups": nn.Conv2d(32, 32, 4, 4, groups=4),
        "mirrored": nn.Conv1d(32, 32, 3, padding=1, padding_mode="reflect"),
        "few features": nn.Conv2d(3, 4, 4, 4),
        "two channels": nn.Conv1d(2, 32, 10, 5),
        "one more on the right": nn.Conv1d(32, 32, 4, padding="same"),
    }
    model = accelerate_for_cpu(nn.ModuleDict(others).eval(), dtype="int8")
    assert not {PATCHES, OVER_TIME} & set(explain(model).counts())


def test_over_time_in_float32_is_left_to_onednn() -> None:
    model = accelerate_for_cpu(holder(nn.Conv1d(32, 48, 3)), dtype="float32")
    assert explain(model).counts() == {}


@torch.no_grad()
def test_layers_on_sound_are_linears_in_every_dtype() -> None:
    row = nn.Sequential(nn.Conv1d(1, 32, 10, 5), nn.GELU(), nn.Conv1d(32, 48, 3, 2), nn.GELU())
    model, x = Holder(row).eval(), torch.randn(2, 1, 300)
    before = model(x)
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts() == {OVER_TIME: 2}
    assert row_error(model(x), before) <= 1e-5


@pytest.mark.parametrize("shape", [(2, 5, 32, 32), (2, 3, 7, 32), (3, 32), (2, 3, 32, 32, 1)])
@torch.no_grad()
def test_bad_input_is_told(shape: tuple[int, ...]) -> None:
    model = accelerate_for_cpu(holder(nn.Conv2d(3, 48, 8, 8)), dtype="float32")
    with pytest.raises(RuntimeError, match="input of shape"):
        model(torch.randn(shape))
