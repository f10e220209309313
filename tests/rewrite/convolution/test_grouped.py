"""Grouped 1-d convolutions, with and without weight norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.grouped import GroupedConvolution

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03, "int4": 0.03}


def model_of(*, normed: bool = True, **changes: object) -> nn.Module:
    options = {"kernel_size": 32, "padding": 16, "groups": 4, **changes}
    convolution = nn.Conv1d(64, 96, **options)  # type: ignore[arg-type]
    convolution = weight_norm(convolution, dim=2) if normed else convolution
    return nn.ModuleDict({"positions": nn.Sequential(convolution)}).eval()


def run(model: nn.Module, input: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model["positions"](input)  # type: ignore[index]
    return output


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"normed": False}, {"bias": False, "stride": 3, "padding": 0}],
    ids=["weight norm", "plain", "strides"],
)
def test_values_and_the_way_back(changes: dict[str, object], dtype: str) -> None:
    model = model_of(**changes)  # type: ignore[arg-type]
    original, state = model["positions"][0], {k: v.clone() for k, v in model.state_dict().items()}
    inputs = [torch.randn(2, 64, 41), torch.randn(1, 64, 70).transpose(1, 2).contiguous().transpose(1, 2)]
    inputs.append(torch.randn(64, 37))
    expected = [run(model, input) for input in inputs]
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["grouped conv1d"] == 1
    assert isinstance(model["positions"][0], GroupedConvolution)
    for input, reference in zip(inputs, expected, strict=True):
        assert row_error(run(model, input).movedim(-2, -1), reference.movedim(-2, -1)) <= TOLERANCES[dtype]
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())
    restore(model)
    assert model["positions"][0] is original
    assert torch.equal(run(model, inputs[0]), expected[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 64, "padding": 0},
        {"dilation": 2},
        {"padding_mode": "circular"},
        {"kernel_size": 3, "padding": 1},
    ],
    ids=str,
)
def test_others_are_left(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    options = {"kernel_size": 32, "padding": 16, "groups": 4, **changes}
    model = nn.ModuleDict({"positions": nn.Sequential(nn.Conv1d(64, 64, **options))}).eval()  # type: ignore[arg-type]
    input = torch.randn(2, 64, 80)
    expected = run(model, input)
    accelerate_for_cpu(model, dtype="float32")
    assert "grouped conv1d" not in explain(model).counts()
    torch.testing.assert_close(run(model, input), expected)


def test_copies_casts_and_bad_input() -> None:
    model, input = model_of(), torch.randn(2, 64, 41)
    accelerate_for_cpu(model, dtype="float32")
    expected = run(model, input)
    other = copy.deepcopy(model)
    assert isinstance(other["positions"][0], GroupedConvolution)
    torch.testing.assert_close(run(other, input), expected)
    other.bfloat16()
    narrow = run(other, input.bfloat16())
    assert narrow.dtype is torch.bfloat16
    assert row_error(narrow.mT, expected.mT) <= 0.02
    with pytest.raises(RuntimeError, match="channels"):
        run(model, torch.randn(2, 63, 41))
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model["positions"](input.requires_grad_())
