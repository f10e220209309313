"""Models quantized by torch.ao, dynamically or statically: their providers, and restoring."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.providers import choice as choices
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.store import Choice
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.quantized.engines import FastestEngine

CHANNELS = 32


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bert() -> BertModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 90}
    return BertModel(BertConfig(num_hidden_layers=2, **sizes)).eval()


def distance(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", ["auto", "int8", "float32"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_dynamic_linears_become_fused_layers(dtype: str, by_channel: bool) -> None:
    model, ids = bert(), torch.randint(0, 90, (2, 17))
    config = ao.per_channel_dynamic_qconfig if by_channel else ao.default_dynamic_qconfig
    quantized = ao.quantize_dynamic(model, {nn.Linear: config})
    other = copy.deepcopy(quantized)
    with torch.no_grad():
        exact, before = (m(ids).last_hidden_state for m in (model, quantized))
        accelerate_for_cpu(quantized, dtype=dtype)
        given = quantized(ids).last_hidden_state
        assert distance(given, exact) < 1.2 * distance(before, exact)
        assert distance(given, before) < 0.03
        assert torch.equal(other(ids).last_hidden_state, before)
    plan = explain(quantized)
    assert sum(item.structure == "encoder layer" for item in plan.replaced) == 2
    linear = quantized.encoder.layer[0].output.dense
    assert isinstance(linear, PackedLinear)
    assert linear.packed_dtype == ("float32" if dtype == "float32" else "int8")
    (item,) = (item for item in plan.items if item.name == "encoder.layer.0.output.dense")
    assert "torch.ao dynamic int8" in item.structure
    assert ("rounding to" in item.structure) == (dtype != "float32")
    restore(quantized)
    with torch.no_grad():
        assert torch.equal(quantized(ids).last_hidden_state, before)


def test_dynamic_float16_is_packed_as_dtype_says() -> None:
    model, x = nn.Sequential(nn.Linear(64, 48), nn.Tanh()).eval(), torch.randn(3, 64)
    quantized = ao.quantize_dynamic(model, {nn.Linear}, dtype=torch.float16)
    with torch.no_grad():
        before = quantized(x)
        accelerate_for_cpu(quantized, dtype="float32")
        torch.testing.assert_close(quantized(x), before, rtol=1e-5, atol=1e-5)
    assert quantized[0].packed_dtype == "float32"
    restore(quantized)
    assert torch.equal(quantized(x), before)


class Images(nn.Module):
    """Statically quantized modules: a convolution with a norm and a ReLU, a sum, and a linear over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm, self.relu = nn.BatchNorm2d(CHANNELS), nn.ReLU()
        self.second, self.add = nn.Conv2d(CHANNELS, CHANNELS, 1), torch.ao.nn.quantized.FloatFunctional()
        self.linear, self.last = nn.Linear(CHANNELS, 40), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.add.add(self.second(self.relu(self.norm(self.first(x)))), x)
        return self.dequant(self.last(self.linear(y.flatten(2).transpose(1, 2).contiguous())))


def images(*, trained: bool) -> tuple[Any, Tensor]:
    """Quantized after training, or in it."""
    model, x = Images().train(trained), torch.randn(2, CHANNELS, 9, 9)
    parts = [["first", "norm", "relu"], ["linear", "last"]]
    model = (ao.fuse_modules_qat if trained else ao.fuse_modules)(model, parts)
    model.qconfig = (ao.get_default_qat_qconfig if trained else ao.get_default_qconfig)("x86")
    prepared = (ao.prepare_qat if trained else ao.prepare)(model)
    prepared(x)
    return ao.convert(prepared.eval()), x


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("engine", [NATIVE, "FBGEMM", "oneDNN"])
def test_static_products_go_to_the_fastest_engine(
    trained: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_CPU_ACCEL_PROVIDERS", raising=False)
    monkeypatch.setattr("hf_cpu_accel.providers.switch.measured", lambda asked: True)
    monkeypatch.setattr(choices.Chooser, "decide", lambda *args: Choice(engine, {engine: 1.0}, 1))
    model, x = images(trained=trained)
    with torch.no_grad():
        before, keys = model(x), list(model.state_dict())
        accelerate_for_cpu(model)
        given = model(x)
    assert (given - before).abs().max() <= 4 * model.linear.scale  # a step of each product
    assert list(model.state_dict()) == keys
    items = {item.name: item for item in explain(model).items}
    for name in ("first", "second", "linear"):
        assert isinstance(model.get_submodule(name).forward, FastestEngine)
        served = items[name].provider
        assert served == "PyTorch" if engine == NATIVE else served.startswith(engine)
    twin = copy.deepcopy(model)
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(x), before)
    assert (twin(x) - before).abs().max() <= 4 * model.linear.scale


def test_an_engine_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = images(trained=False)
    forward = FastestEngine(model.linear)
    monkeypatch.setattr(choices.Chooser, "decide", lambda *args: Choice("oneDNN", {"oneDNN": 1.0}, 1))
    monkeypatch.setattr(FastestEngine, "_agrees", lambda *args: False)
    input = torch.quantize_per_tensor(torch.randn(5, CHANNELS), 0.05, 64, torch.quint8)
    assert torch.equal(forward(input).int_repr(), model.linear(input).int_repr())
    assert not forward.elsewhere


def test_unmeasured_engines_are_told() -> None:
    model, x = images(trained=False)
    before = model(x)
    accelerate_for_cpu(model, providers="own")
    assert {item.name: item.reason for item in explain(model).left}["linear"] == (
        "it keeps the engine it was packed for; measuring other engines is off"
    )
    assert torch.equal(model(x), before)


def test_what_is_still_trained_has_to_be_in_eval_mode() -> None:
    model = Images().train()
    model.qconfig = ao.get_default_qat_qconfig("x86")
    with pytest.raises(ValueError, match=r"training mode.*model\.eval\(\)"):
        accelerate_for_cpu(ao.prepare_qat(model))
