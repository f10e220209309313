"""Every candidate that works here against float64, on the values of the packed weight."""

import copy

import pytest
import torch
from torch.nn import functional as F

from hf_cpu_accel.ops.linear import linear_reference
from hf_cpu_accel.packing.linear import pack_linear, unpack_linear
from hf_cpu_accel.providers import torch_ops
from hf_cpu_accel.providers.copies import Copies
from hf_cpu_accel.providers.torch_ops import PROVIDERS, Provider, candidates, provider_named

WORKING = [provider for provider in PROVIDERS if provider.works()]
IDS = [f"{provider.name}-{provider.dtype}" for provider in WORKING]
# Relative error of the worst row: float32 sums; bfloat16 inputs, weights as packed, and outputs.
TOLERANCES = {"float32": 2e-6, "bfloat16": 8e-3}


def error(given, expected):
    difference = (given.double() - expected).norm(dim=-1)
    return (difference / expected.norm(dim=-1).clamp_min(1e-9)).max().item()


def test_torch_has_a_candidate_for_each_floating_dtype():
    assert candidates("float32")
    assert bool(candidates("bfloat16")) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("provider", WORKING, ids=IDS)
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(9, 16, 8), (33, 65, 47), (128, 96, 256), (17, 100, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_computes_the_linear(provider, rows, out_features, in_features, dtype, bias, threads):
    packed = pack_linear(torch.randn(out_features, in_features), provider.dtype)
    input = torch.randn(rows, in_features).to(dtype)
    vector = torch.randn(out_features) if bias else None
    given = Copies(packed).of(provider).multiply(input, vector)
    assert given.shape == (rows, out_features)
    assert given.dtype is dtype
    assert given.is_contiguous()
    if provider.dtype == "int8":
        data = packed.data, packed.scale, vector, None, out_features, "none"
        expected, allowed = linear_reference(input.float(), *data).double(), 2e-3
    else:
        bias64 = None if vector is None else vector.double()
        expected = F.linear(input.double(), unpack_linear(packed).double(), bias64)
        allowed = TOLERANCES[provider.dtype]
    if dtype is torch.bfloat16:
        allowed += 4e-3  # of the output
    assert error(given, expected) <= allowed


@pytest.mark.parametrize("provider", WORKING, ids=IDS)
def test_takes_any_leading_dimensions_and_strides(provider):
    packed = pack_linear(torch.randn(48, 64), provider.dtype)
    copies, bias = Copies(packed), torch.randn(48)
    multiply = copies.of(provider).multiply
    input = torch.randn(3, 64, 20).transpose(1, 2)
    expected = multiply(input.contiguous(), bias)
    torch.testing.assert_close(multiply(input, bias), expected)
    torch.testing.assert_close(multiply(input[:, ::2], bias), expected[:, ::2], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(multiply(input[0], bias), expected[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("provider", WORKING, ids=IDS)
def test_takes_a_view_of_a_merged_weight(provider):
    weight = torch.randn(96, 64)
    whole = pack_linear(weight, provider.dtype)
    input = torch.randn(20, 64)
    given = Copies(whole.narrow(32, 64)).of(provider).multiply(input, None)
    expected = Copies(pack_linear(weight[32:], provider.dtype)).of(provider).multiply(input, None)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("provider", [p for p in WORKING if p.dtype == "int8"], ids=lambda p: p.name)
def test_int8_quantizes_each_row_by_itself(provider):
    packed = pack_linear(torch.randn(32, 64), "int8")
    multiply = Copies(packed).of(provider).multiply
    small = torch.randn(9, 64)
    together = multiply(torch.cat([small, torch.randn(1, 64) * 1e4]), None)
    torch.testing.assert_close(together[:9], multiply(small, None))
    assert torch.equal(multiply(torch.zeros(9, 64), None), torch.zeros(9, 32))


def test_copies_live_as_long_as_they_are_used():
    packed = pack_linear(torch.randn(32, 64), "float32")
    copies = Copies(packed)
    weight = copies.of(candidates("float32")[0])
    assert copies.of(candidates("float32")[0]) is weight
    assert copies.nbytes == weight.nbytes == 4 * 32 * 64
    del weight
    assert copies.nbytes == 0


def test_copies_leave_some_memory_free(monkeypatch):
    class Memory:
        available = 1 << 20

    monkeypatch.setattr("hf_cpu_accel.providers.copies.psutil.virtual_memory", lambda: Memory)
    with pytest.raises(MemoryError):
        Copies(pack_linear(torch.randn(32, 64), "float32")).of(candidates("float32")[0])


def wrong_values(packed, values):
    return torch_ops.ProviderWeight(lambda input, bias: input @ values.T, 0)


def wrong_dtype(packed, values):
    right = WORKING[0].prepare(packed, values).multiply
    return torch_ops.ProviderWeight(lambda input, bias: right(input, bias).double(), 0)


def missing_op(packed, values):
    return torch.ops.mkldnn._no_such_op(values)


@pytest.mark.parametrize("prepare", [wrong_values, wrong_dtype, missing_op])
def test_what_is_missing_or_wrong_is_no_candidate(prepare, monkeypatch):
    provider = Provider("bad", "float32", prepare)
    monkeypatch.setattr(torch_ops, "PROVIDERS", (provider,))
    assert candidates("float32") == ()
    assert provider_named("bad", "float32") is None


def test_what_is_not_wanted_here_is_not_measured(monkeypatch):
    unwanted = Provider("slow", "float32", candidates("float32")[0].prepare, wanted=lambda: False)
    monkeypatch.setattr(torch_ops, "PROVIDERS", (unwanted,))
    assert candidates("float32") == ()


@pytest.mark.parametrize("flags", [{"avx512_vnni"}, {"amx_tile", "amx_int8"}])
def test_int8_has_another_candidate_with_amx_only(flags, monkeypatch):
    cpu = copy.copy(torch_ops.hardware.detect())
    object.__setattr__(cpu, "flags", frozenset(flags))
    monkeypatch.setattr(torch_ops.hardware, "detect", lambda: cpu)
    working = any(provider.dtype == "int8" for provider in WORKING)
    assert bool(candidates("int8")) == (working and "amx_int8" in flags)
