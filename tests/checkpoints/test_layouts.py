"""GPTQ, AWQ and fp8 tensors against the weights that they were written from, value by value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.checkpoints.formats import checkpoint_of
from hf_cpu_accel.checkpoints.layout import FloatLayout, IntegerLayout, UnreadableCheckpoint
from hf_cpu_accel.checkpoints.stored import pack_stored, stored_weight
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.packing.linear import unpack_linear
from tests.checkpoints.writers import Written, awq, fp8, gptq, stored_linear


def packed_weight(module: StoredLinear) -> Tensor:
    """What becomes of it in affine groups, with the input features in their own order."""
    weight = stored_weight(module)
    assert weight is not None
    assert weight.refusal is None
    values = unpack_linear(pack_stored([weight]))
    return values if weight.permutation is None else values[:, weight.permutation.argsort()]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_in_all_bits(bits: int, symmetric: bool, version: int) -> None:
    written = gptq(64, 96, bits=bits, version=version, symmetric=symmetric)
    form = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": form}
    module = stored_linear(config, written)
    assert torch.equal(module.dequantize(), written.weight)
    assert torch.equal(packed_weight(module), written.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("columns", "group", "packed"),
    [
        (128, 32, 32),
        (128, 64, 64),
        (256, 128, 128),
        (160, -1, 192),
        (192, 96, 32),
        (96, 48, 16),
        (80, 32, 32),
    ],
)
def test_gptq_in_groups_of_any_size(columns: int, group: int, packed: int, dtype: torch.dtype) -> None:
    written = gptq(70 if dtype is torch.float32 else 64, columns, group=group, dtype=dtype, bits=8)
    module = stored_linear({"quant_method": "gptq", "bits": 8, "group_size": group}, written)
    assert isinstance(module.layout, IntegerLayout)
    assert module.layout.packed_group == packed
    assert torch.equal(module.dequantize(), written.weight)
    assert torch.allclose(packed_weight(module), written.weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize("columns", [96, 80])
def test_an_order_by_activation_permutes_input_features(columns: int) -> None:
    index = (torch.arange(columns) // 32)[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    written = gptq(40, columns, index=index)
    module = stored_linear({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, written)
    weight = stored_weight(module)
    assert weight is not None
    assert weight.permutation is not None
    assert torch.equal(module.dequantize(), written.weight)
    assert torch.equal(packed_weight(module), written.weight)


def test_groups_of_unlike_sizes_are_computed_and_not_packed() -> None:
    written = gptq(32, 96, index=torch.arange(96) // 40)
    module = stored_linear({"quant_method": "gptq", "bits": 4, "group_size": 32}, written)
    weight = stored_weight(module)
    assert weight is not None
    assert weight.refusal == "GPTQ, 4 bits in groups of 32: its groups do not all have 32 input features"
    assert torch.equal(module.dequantize(), written.weight)


def test_zeros_of_the_first_format_are_added_to_words() -> None:
    """As gptqmodel does: a zero of 0 was stored by a subtraction that borrows from the next field."""
    written = gptq(64, 64, version=2)
    zeros = torch.randint(-(2**31), 2**31, written.tensors["qzeros"].shape, dtype=torch.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    second = stored_linear(
        config | {"checkpoint_format": "gptq_v2"},
        Written({**written.tensors, "qzeros": zeros}, written.weight),
    )
    first = stored_linear(config, Written({**written.tensors, "qzeros": zeros - 0x11111111}, written.weight))
    assert torch.equal(first.dequantize(), second.dequantize())


@pytest.mark.parametrize("gemv", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(128, 32), (192, 64), (384, 128), (160, -1)])
def test_awq_in_both_orders(columns: int, group: int, gemv: bool) -> None:
    written = awq(72, columns, group=group, gemv=gemv)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv" if gemv else "GEMM"}
    module = stored_linear(config, written)
    assert torch.equal(module.dequantize(), written.weight)
    assert torch.equal(packed_weight(module), written.weight)


def test_many_output_features_are_read_in_pieces() -> None:
    written = awq(2088, 64)
    assert torch.equal(
        packed_weight(stored_linear({"quant_method": "awq", "group_size": 32}, written)), written.weight
    )
    written = gptq(2080, 64)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    assert torch.equal(packed_weight(stored_linear(config, written)), written.weight)


@pytest.mark.parametrize("block", [(128, 128), (48, 32), None])
def test_fp8_in_blocks(block: tuple[int, int] | None) -> None:
    written = fp8(200, 136, block=block)
    module = stored_linear({"quant_method": "fp8", "weight_block_size": block and list(block)}, written)
    assert isinstance(module.layout, FloatLayout)
    assert torch.equal(module.dequantize(), written.weight)
    weight = stored_weight(module)
    assert weight is not None
    assert weight.values is not None
    assert weight.rows is None
    assert torch.equal(weight.values(32, 100), written.weight[32:100])


def test_casts_leave_what_is_stored_and_copies_are_whole() -> None:
    written = gptq(32, 64)
    module = stored_linear({"quant_method": "gptq", "bits": 4, "group_size": 32}, written, bias=True)
    x = torch.randn(3, 64)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        module.to(torch.bfloat16).float(),
    ):
        assert other.scales.dtype is torch.float16
        assert torch.equal(other.dequantize(), written.weight)
        assert list(other.state_dict()) == ["qweight", "qzeros", "scales", "g_idx", "bias"]
        assert torch.allclose(other(x), x @ written.weight.T + other.bias, atol=1e-5)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 5}, "GPTQ with bits=5 is not supported; expected one of 2, 3, 4, 8"),
        (GPTQ | {"bits": "4"}, "GPTQ with bits='4'"),
        (GPTQ | {"bits": 4.0}, r"GPTQ with bits=4\.0"),
        (GPTQ | {"group_size": 0}, "group_size=0"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not supported; expected 'gptq' or 'gptq_v2'",
        ),
        (AWQ | {"bits": 8}, "AWQ with bits=8 is not supported; expected 4"),
        (AWQ | {"version": "gemv_fast"}, "version='gemv_fast' is not supported; expected 'gemm' or 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        (
            {"quant_method": "aqlm"},
            "quant_method='aqlm' is not supported; expected one of gptq, awq, compressed-tensors, fp8",
        ),
    ],
)
def test_configs_that_are_not_known_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match=message):
        checkpoint_of(config)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("qweight", None, "layer.qweight is missing"),
        ("scales", None, "layer.scales is missing"),
        (
            "qweight",
            torch.zeros(4, 32, dtype=torch.int32),
            r"qweight has dtype torch.int32 and shape \[4, 32\]: expected int32 \[8, 32\]",
        ),
        ("qweight", torch.zeros(8, 32), "expected int32"),
        ("qzeros", torch.zeros(3, 4, dtype=torch.int32), r"expected int32 \[2, 4\]"),
        ("scales", torch.zeros(2, 32, dtype=torch.int64), "expected float16 or bfloat16 or float32"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), r"expected int32 or int64 \[64\]"),
    ],
)
def test_tensors_of_another_shape_are_refused(name: str, tensor: Tensor | None, message: str) -> None:
    tensors = dict(gptq(32, 64).tensors)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(UnreadableCheckpoint, match=message):
        checkpoint_of(GPTQ).layout("layer", 32, 64, tensors)


def test_values_that_no_weight_has_are_refused() -> None:
    written = gptq(32, 64)
    for name, value, message in (
        ("scales", torch.full((2, 32), torch.nan).half(), "scales contains NaN"),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32), "g_idx has groups from 2 to 2: expected 0 to 1"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "from -1"),
    ):
        with pytest.raises(UnreadableCheckpoint, match=message):
            stored_linear(GPTQ, Written({**written.tensors, name: value}, written.weight))
    without = {name: tensor for name, tensor in written.tensors.items() if name != "g_idx"}
    assert checkpoint_of(GPTQ).layout("layer", 32, 64, without) is not None
    with pytest.raises(UnreadableCheckpoint, match=r"layer\.g_idx is missing"):
        checkpoint_of(GPTQ | {"desc_act": True}).layout("layer", 32, 64, without)
    plain = {"weight": torch.zeros(32, 64)}
    assert checkpoint_of(GPTQ).layout("layer", 32, 64, plain) is None
