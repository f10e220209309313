"""Linears that a host has quantized: packed from what they hold, given back, and told where they were rounded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.stored import stored_weight
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.checkpoints.host_linears import (
    AS_ASKED,
    COLUMNS,
    EXACT,
    ROUNDED,
    SIZES,
    Make,
    Projections,
    be_hosts,
    held,
    outputs,
    quanto,
    torchao,
    true_weight,
)
from tests.checkpoints.stand_ins import (
    HQQLinear,
    IntxUnpackedToInt8Tensor,
    Linear4bit,
    Linear8bitLt,
    QTensor,
    Wrapper,
)


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    be_hosts(monkeypatch)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED, *AS_ASKED])
def test_what_the_host_multiplies_by_is_what_is_computed(name: str) -> None:
    rounded, as_asked = (ROUNDED.get(name), "affine8"), (AS_ASKED.get(name), "float32")
    make, form = EXACT.get(name) or (rounded if rounded[0] else as_asked)
    assert make is not None
    model = Projections(make)
    x = torch.randn(5, COLUMNS)
    with torch.no_grad():
        rows = model.norm(x).double()
    true = {key: true_weight(model.get_submodule(key)) for key in SIZES}
    bias = {key: model.get_submodule(key).bias for key in SIZES}
    before = {key: value.clone() for key, value in held(model).items()}
    bytes_before = {key: value.untyped_storage().nbytes() for key, value in held(model).items()}
    accelerate_for_cpu(model, dtype="float32")
    packed: list[Any] = [model.get_submodule(key) for key in SIZES]
    assert all(isinstance(linear, PackedLinear) for linear in packed)
    assert len({id(linear.group) for linear in packed}) == 1
    assert {linear.packed_dtype for linear in packed} == {form}
    bound = 1e-2 if name in ROUNDED else 1e-3
    for key, given in zip(SIZES, outputs(model, x), strict=True):
        expected = F.linear(rows, true[key].double(), None if bias[key] is None else bias[key].double())
        assert (given - expected).abs().max() <= bound * expected.abs().max(), key
    restore(model)
    after = held(model)
    assert list(after) == list(before)
    for key, value in before.items():
        assert torch.equal(after[key].view(torch.uint8), value.view(torch.uint8)), key
        assert after[key].dtype is value.dtype
        assert after[key].untyped_storage().nbytes() == bytes_before[key]


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        *((name, "float32", "affine8") for name in ROUNDED),
        *((name, dtype, dtype) for name in AS_ASKED for dtype in ("bfloat16", "int8")),
    ],
)
def test_rounding_is_measured_and_told(name: str, dtype: str, form: str) -> None:
    model = Projections({**ROUNDED, **AS_ASKED}[name])
    true = {key: true_weight(model.get_submodule(key)) for key in SIZES}
    accelerate_for_cpu(model, dtype=dtype)
    items = {item.name: item for item in explain(model).items}
    for key in SIZES:
        error = ((model.get_submodule(key).unpack() - true[key]).norm() / true[key].norm()).item()
        told = re.search(rf"; rounding to {form}: ([\d.e-]+)\)", items[key].structure)
        assert told is not None, items[key].structure
        assert float(told[1]) == pytest.approx(error, rel=0.05)
        assert 0 < error < 0.01


@pytest.mark.parametrize("name", [*EXACT, *AS_ASKED])
def test_an_exact_form_says_nothing_of_rounding(name: str) -> None:
    model = Projections(EXACT[name][0] if name in EXACT else AS_ASKED[name])
    accelerate_for_cpu(model, dtype="float32")
    assert "rounding to" not in " ".join(item.structure for item in explain(model).items)


@pytest.mark.parametrize("make", [Linear8bitLt.random, ROUNDED["bitsandbytes NF4"]], ids=["int8", "NF4"])
def test_modules_that_rearrange_themselves_when_called_are_not_called(make: Make) -> None:
    model: Any = Projections(make)
    linear = model.q
    accelerate_for_cpu(model)
    assert linear.calls == 0


def test_bfloat16_models_compute_in_bfloat16() -> None:
    model = Projections(EXACT["bitsandbytes int8"][0]).bfloat16()
    x = torch.randn(5, COLUMNS).bfloat16()
    expected = outputs(model, x)
    accelerate_for_cpu(model, dtype="float32")
    for given, wanted in zip(outputs(model, x), expected, strict=True):
        assert given.dtype is torch.bfloat16
        assert (given - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def _hqq_quantized_scales(n: int, k: int, bias: Tensor | None) -> nn.Module:
    made = HQQLinear.random(n, k, bias, 4, 64)
    made.meta["quant_scale"] = True
    return made


def _torchao_scaled_input(n: int, k: int, bias: Tensor | None) -> nn.Module:
    weight = IntxUnpackedToInt8Tensor.random(n, k, 4, 32)
    weight.act_pre_scale = torch.ones(k)
    return torchao(weight, bias)


def _quanto_axis(n: int, k: int, bias: Tensor | None) -> nn.Module:
    weight = QTensor.bytes(n, k)
    weight.axis = -1
    return quanto(weight, bias)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_hqq_quantized_scales, "HQQ: quantized scales or zeros are not supported"),
        (_torchao_scaled_input, "torchao IntxUnpackedToInt8, 4 bits: a scaled input is not supported"),
        (_quanto_axis, "quanto qint8: scales per input feature are not supported"),
        (
            lambda n, k, b: torchao(IntxUnpackedToInt8Tensor.random(n, k, 4, 8), b),
            "torchao IntxUnpackedToInt8, 4 bits: groups of 8 input features are not supported",
        ),
        (
            lambda n, k, b: torchao(Wrapper.of(torch.randn(n, k), qdata=torch.zeros(n, k)), b),
            "its weight is a Wrapper, which cannot be read",
        ),
    ],
    ids=["hqq", "torchao scaled", "quanto axis", "torchao group", "unknown class"],
)
def test_what_cannot_be_held_stays_and_is_said(make: Make, reason: str) -> None:
    model = Projections(make)
    kinds = [type(model.get_submodule(key)) for key in SIZES]
    accelerate_for_cpu(model, dtype="float32")
    assert [type(model.get_submodule(key)) for key in SIZES] == kinds
    reasons = {item.name: item.reason for item in explain(model).items}
    assert {reasons[key] for key in SIZES} == {reason}


def test_a_block_that_runs_over_the_end_of_a_row_is_split_where_it_can_be() -> None:
    def make(n: int, k: int, bias: Tensor | None) -> nn.Module:
        return Linear4bit.random(n, k, bias, "nf4", nested=False)

    for columns, group in ((96, 32), (80, 16), (72, None)):
        linear = make(64, columns, None)
        weight = stored_weight(linear)
        assert weight is not None
        if group is None:
            assert (
                weight.refusal == "blocks of 64 cross the rows of 72 input features: no group has one scale"
            )
            continue
        assert (weight.group, weight.refusal) == (group, None)
        near, true = weight.rows(32, 64).dequantize(), true_weight(linear)[32:]
        assert (near - true).abs().max() <= 0.004 * true.abs().max()
        assert weight.values is not None
        assert torch.allclose(weight.values(32, 64), true)


def test_a_host_that_was_not_imported_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Linear8bitLt.random(64, COLUMNS, None)
    monkeypatch.undo()
    assert stored_weight(linear) is None


def test_integers_in_a_tensor_of_floats_are_not_looked_at_as_floats() -> None:
    def make(n: int, k: int, bias: Tensor | None) -> nn.Module:
        linear: Any = Linear4bit.random(n, k, bias, "nf4", nested=False)
        state = linear.quant_state
        linear.weight = nn.Parameter(linear.weight.data.view(-1).view(torch.bfloat16), requires_grad=False)
        linear.weight.quant_state = state
        return linear

    model: Any = Projections(make)
    assert torch.isnan(model.q.weight).any()
    x = torch.randn(3, COLUMNS)
    before, expected = model.q.weight.view(torch.uint8).clone(), outputs(model, x)
    accelerate_for_cpu(model, dtype="float32")
    for given, wanted in zip(outputs(model, x), expected, strict=True):
        assert (given - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    restore(model)
    assert torch.equal(model.q.weight.view(torch.uint8), before)


def test_experts_of_an_unknown_tensor_class_stay_and_are_said() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("up", (4, 64, 32)), ("down", (4, 32, 64))):
                stack = Wrapper.of(torch.randn(shape), qdata=torch.zeros(shape))
                self.register_parameter(name, nn.Parameter(stack, requires_grad=False))

        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError

    model = nn.Sequential(Experts(), nn.LayerNorm(32)).eval()
    accelerate_for_cpu(model, dtype="float32")
    item = next(item for item in explain(model).items if item.name == "0")
    assert item.reason == "its weights are Wrappers, which cannot be read"
