"""Weights that bitsandbytes, torchao, HQQ and optimum-quanto themselves have quantized, against their own dequantization.

Not in the suite, which lacks these packages (bitsandbytes has 120 MB of CUDA code, and transformers does other things where it
finds the rest): `make test-formats` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
import torchao.quantization as ao
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from optimum import quanto
from torch import Tensor, nn
from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.stored import rounding_error, stored_weight
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.checkpoints.host_linears import SIZES, Projections, outputs

COLUMNS = 256


def levels(kind: str, *, nested: bool) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            quant_type=kind,
            compress_statistics=nested,
        )
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")

    return make


def int8(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=6.0,
    )
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def hqq(bits: int, group: int | None = 64, axis: int = 1) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        return HQQLinear(linear, config, compute_dtype=linear.weight.dtype, device="cpu")

    return make


def of_quanto(qtype: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        box = nn.Sequential(linear)
        quanto.quantize(box, weights=qtype)
        quanto.freeze(box)
        return box[0]

    return make


def of_torchao(config: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        box = nn.Sequential(linear)
        ao.quantize_(box, config)
        return box[0]

    return make


def opaque(linear: nn.Linear) -> nn.Module:
    weight = Int4OpaqueTensor.from_hp(linear.weight.detach(), [1, 64])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def unpacked(linear: Any) -> Tensor:
    """The weight, by its package's own function."""
    if isinstance(linear, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    if isinstance(linear, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(linear.weight.data, linear.weight.SCB)
    if isinstance(linear, HQQLinear):
        return linear.dequantize()
    if isinstance(linear.weight, Int4OpaqueTensor):
        return F.linear(torch.eye(COLUMNS, dtype=linear.weight.dtype), linear.weight).T
    return linear.weight.dequantize()


EXACT: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "bnb int8": int8,
    **{f"hqq {bits}": hqq(bits) for bits in (8, 4, 3, 2, 1)},
    "hqq rows": hqq(4, None),
    **{str(qtype): of_quanto(qtype) for qtype in (quanto.qint8, quanto.qint4, quanto.qint2)},
    "ao int8": of_torchao(ao.Int8WeightOnlyConfig()),
    "ao int8 dynamic": of_torchao(ao.Int8DynamicActivationInt8WeightConfig()),
    "ao int4": of_torchao(ao.IntxWeightOnlyConfig(torch.int4, granularity=ao.PerGroup(32))),
    "ao int6": of_torchao(ao.IntxWeightOnlyConfig(torch.int6, granularity=ao.PerGroup(64))),
    "ao int4 dynamic": of_torchao(ao.Int8DynamicActivationIntxWeightConfig(torch.int4)),
    "ao int4 for the CPU": opaque,
}
# Packed as `dtype` says, float32 here.
EXACT |= {"hqq axis 0": hqq(4, 64, 0), "quanto float8": of_quanto(quanto.qfloat8)}
ROUNDED = {
    "bnb nf4": (levels("nf4", nested=True), 0.004),
    "bnb nf4 flat": (levels("nf4", nested=False), 0.004),
    "bnb fp4": (levels("fp4", nested=True), 0.004),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_packed_from_what_the_package_made(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, most = ROUNDED.get(name) or (EXACT[name], 0.0)
    model = Projections(lambda n, k, bias: make(nn.Linear(k, n, bias=bias is not None, dtype=dtype)), COLUMNS)
    model = model.eval()
    model.norm.to(dtype)
    x = torch.randn(5, COLUMNS, dtype=dtype)
    with torch.no_grad():
        rows = model.norm(x).double()
    linears: dict[str, Any] = {key: model.get_submodule(key) for key in SIZES}
    weights = {key: unpacked(linear).double() for key, linear in linears.items()}
    accelerate_for_cpu(model, dtype="float32")
    given = outputs(model, x)
    bound = 1e-2 if most else 1e-3 if dtype is torch.float32 else 1e-2
    for (key, linear), got in zip(linears.items(), given, strict=True):
        assert isinstance(model.get_submodule(key), PackedLinear), explain(model)
        bias = None if linear.bias is None else linear.bias.double()
        expected = F.linear(rows, weights[key], bias)
        assert (got - expected).abs().max() <= bound * expected.abs().max()
    restore(model)
    for key, linear in linears.items():
        assert model.get_submodule(key) is linear
        assert torch.equal(unpacked(linear).double(), weights[key])
        weight = stored_weight(linear)
        assert weight is not None
        assert rounding_error(weight) <= most


@pytest.mark.parametrize("nested", [False, True])
def test_the_order_of_bitsandbytes_for_the_cpu(nested: bool) -> None:
    torch.manual_seed(0)
    linear: Any = levels("nf4", nested=nested)(nn.Linear(COLUMNS, 96))
    before = unpacked(linear)
    linear.weight.data, _ = _convert_weight_packed_for_cpu(linear.weight.data, linear.weight.quant_state)
    weight = stored_weight(linear)
    assert weight is not None
    assert weight.values is not None
    assert torch.allclose(weight.values(32, 96), before[32:], rtol=2**-8)  # the magnitudes are bfloat16 there


@pytest.mark.parametrize(
    ("config", "saves"),
    [
        (lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), False),
        (lambda: BitsAndBytesConfig(load_in_8bit=True), True),
        (lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()), True),
        (lambda: TorchAoConfig(ao.IntxWeightOnlyConfig(torch.int4)), True),
        (lambda: QuantoConfig(weights="int8"), False),
        (lambda: QuantoConfig(weights="int4"), False),
    ],
    ids=["nf4", "int8", "torchao int8", "torchao int4", "quanto int8", "quanto int4"],
)
def test_quantized_by_transformers_as_it_loads(
    config: Callable[[], Any], saves: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **sizes)).save_pretrained(tmp_path)
    ids = torch.randint(0, 512, (2, 9))

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            return model(ids).logits

    options = {"quantization_config": config(), "dtype": torch.float32}
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path, **options))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **options, cpu_optimize="float32")
    assert explain(model).counts()["decoder layer"] == 2
    given = logits(model)
    assert (given - plain).abs().max() <= 0.02 * plain.abs().max()  # bitsandbytes rounds activations
    model.save_pretrained(tmp_path / "packed", packed=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), given)
    if saves:  # bitsandbytes rounds the scales of NF4 when it is saved, quanto is not saved at all
        model.save_pretrained(tmp_path / "plain")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), plain)
    restore(model)
    assert torch.equal(logits(model), plain)
