"""Calls that `make fuzz` found to crash, or to be answered where nothing is right: the ops refuse them in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.abi import LayerLayout, columns
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.ops.encoder_layer import EncoderInputs
from hf_cpu_accel.ops.kv_cache import from_storage, to_storage
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.ops.messages.reference import message_reduce_reference
from hf_cpu_accel.packing.linear import int4, pack_linear
from tests.ops.decoder.call import call_of
from tests.ops.decoder.cases import Case as DecoderCase
from tests.ops.encoder.call import masks_of, weights_of
from tests.ops.encoder.cases import Case as EncoderCase
from tests.ops.test_experts import choice_of, experts_of, flat

OPS = torch.ops.hf_cpu_accel
LARGEST = 2**63 - 1


def encoder_layer(form: str = "none", **changed: Any) -> Tensor:
    """One call with arguments changed by name."""
    case = EncoderCase(mask=form)
    hidden_states, (padding, scores) = torch.randn(2, 19, 64), masks_of(case)
    names = [argument.name for argument in OPS.encoder_layer.default._schema.arguments]
    inputs = EncoderInputs(padding, scores)
    given = (hidden_states, *inputs, *weights_of(case).arguments(), None)
    return OPS.encoder_layer(*{**dict(zip(names, given, strict=True)), **changed}.values())


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("permutation", {"order": [32, 1, 2]}),
        ("permutation", {"order": [0, 1, -1]}),
        ("window", {"window": LARGEST}),
        ("input and", {"attention_features": 1 << 62, "head_size": 1 << 62}),
        ("input and", {"intermediate_features": 1 << 62}),
        ("mask must be float32", {"mask": torch.zeros(2, 1, 1, 19, dtype=torch.float64)}),
        ("mask must be float32", {"mask": torch.zeros(2, 4, 19, 19, dtype=torch.float16)}),
        ("mask must be float32", {"mask": torch.ones(2, 1, 1, 19, dtype=torch.int64)}),
    ],
)
def test_encoder_layer(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=message):
        encoder_layer(**changed)


def test_encoder_layer_without_tokens_looks_at_its_arguments() -> None:
    assert not encoder_layer("all empty").any()
    with pytest.raises(RuntimeError, match="cos and sin must be"):
        encoder_layer("all empty", cos=torch.zeros(8), sin=torch.zeros(8))
    with pytest.raises(RuntimeError, match="mask must be"):
        encoder_layer("all empty", mask=torch.zeros(2, 1, 1, 18))


def decoder_layers(case: DecoderCase, **changed: Any) -> Tensor:
    call = call_of(case)
    names = [argument.name for argument in OPS.decoder_layers.default._schema.arguments]
    given = dict(zip(names, call.flat(call.keys, call.values), strict=True))
    return OPS.decoder_layers(*{**given, **changed}.values())


@pytest.mark.parametrize("row", [-1, 3, 10_000, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("q_len", [1, 30])
def test_decoder_layers_with_rows_that_are_not_there(row: int, q_len: int) -> None:
    rows = torch.zeros(3, 11, dtype=torch.int32)
    rows[1, 4] = row
    with pytest.raises(RuntimeError, match="rows must name rows from 0 to 2 of keys and values, and names"):
        decoder_layers(DecoderCase(batch=3, q_len=q_len), rows=rows)


def test_rows_of_padding_may_be_anything() -> None:
    rows, start = torch.zeros(3, 11, dtype=torch.int32), torch.tensor([5, 0, 0], dtype=torch.int32)
    rows[0, :5] = -7
    assert decoder_layers(DecoderCase(batch=3), rows=rows, start=start).isfinite().all()


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("past must not be", {"past": [LARGEST, LARGEST]}),
        ("mask must be float32", {"mask": torch.zeros(2, 1, 1, 12, dtype=torch.float64)}),
        ("mask must be float32", {"mask": torch.zeros(2, 1, 1, 12, dtype=torch.uint8)}),
    ],
)
def test_decoder_layers(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=message):
        decoder_layers(DecoderCase(), **changed)


@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        ("activation", "activation", len(ACTIVATIONS)),
        ("activation", "activation", -1),
        ("no kind", "attention_norm.kind", 3),
        ("no kind", "query_norm.kind", -1),
        ("no kind", "key_norm_scope", 3),
        ("relative", "relative", 0),
        ("window", "window", -1),
        ("rotary has no table", "rotary", 1 << 62),
        ("outside of the qkv", "query.stride", 1 << 62),
        ("elements that vectors does not have", "qkv.bias", LARGEST),
        ("heads must be a multiple", "heads", 1 << 62),
        ("input and", "intermediate_features", 1 << 62),
    ],
)
def test_decoder_layers_with_a_layout_that_bind_did_not_write(message: str, name: str, value: int) -> None:
    call = call_of(DecoderCase())
    layout = call.layers.layout.clone()
    layout[0, columns(LayerLayout).index(name)] = value
    with pytest.raises(RuntimeError, match=message):
        decoder_layers(DecoderCase(), layout=layout)


def test_decoder_layers_without_tokens_looks_at_its_arguments() -> None:
    nothing = torch.zeros(2, 0, 64)
    assert decoder_layers(DecoderCase(q_len=0)).shape == nothing.shape
    with pytest.raises(RuntimeError, match="mask must be"):
        decoder_layers(DecoderCase(q_len=0), mask=torch.zeros(2, 1, 1, 3))
    with pytest.raises(RuntimeError, match="rotary tables must be"):
        decoder_layers(DecoderCase(), hidden_states=nothing)


def test_attention_without_queries_looks_at_its_mask() -> None:
    query, key = torch.randn(2, 3, 0, 8), torch.randn(2, 3, 5, 8)
    with pytest.raises(RuntimeError, match="two dimensions"):
        OPS.attention(query, key, key, torch.ones(1, 5, dtype=torch.bool), False, None)
    with pytest.raises(RuntimeError, match=r"four dimensions|mask must be"):
        OPS.attention(query, key, key, torch.zeros(1, 2, 3, 0, 5), False, None)


def test_paged_attention_with_a_negative_window() -> None:
    states, begin = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="window must be"):
        OPS.paged_attention(states, states, states, begin, begin, torch.arange(4).int(), -1, 1.0)


@pytest.mark.parametrize("cols", [-1, -(2**31), 2**31, 2**40])
def test_csr_transpose(cols: int) -> None:
    rowptr, col = torch.tensor([0, 0], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cols must be from 0"):
        OPS.csr_transpose(rowptr, col, cols)


def test_edge_messages_without_edges_looks_at_rowptr() -> None:
    rowptr, col = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="rowptr must not"):
        OPS.edge_messages(rowptr, col, None, torch.randn(3, 2), None, None, False, None, None, None)


def test_graphs_without_rows_or_features_are_looked_at() -> None:
    beyond, col = torch.tensor([3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    nothing, none = torch.zeros(5, 0), [None, None, None]
    for x in (nothing, torch.randn(5, 4)):
        with pytest.raises(RuntimeError, match="rowptr must not"):
            OPS.spmm_reduce(beyond, col, None, x, "sum", None, 1.0, None, *none)
        with pytest.raises(RuntimeError, match="rowptr must not"):
            OPS.sddmm(beyond, col, x[:0], x, 1)
        with pytest.raises(RuntimeError, match="rowptr must not"):
            OPS.message_reduce(beyond, col, None, x, None, None, False, "sum", False, *none)
    with pytest.raises(RuntimeError, match="addend must be"):
        OPS.spmm_reduce(beyond - 3, col, None, nothing, "sum", torch.zeros(1, 7), 1.0, None, *none)
    with pytest.raises(RuntimeError, match="unknown name in 'sum,'"):
        OPS.message_reduce(beyond - 3, col, None, nothing, None, None, False, "sum,", False, *none)


def test_std_of_infinity_is_not_a_number() -> None:
    """As in PyTorch Geometric; the reference said 0."""
    rowptr, col, x = torch.tensor([0, 1]).int(), torch.zeros(1).int(), torch.full((1, 3), torch.inf)
    output, _ = OPS.message_reduce(rowptr, col, None, x, None, None, False, "std", False, None, None, None)
    expected, _ = message_reduce_reference(rowptr, col, None, x, None, None, False, "std", False)
    assert output.isnan().all()
    assert expected.isnan().all()


@pytest.mark.parametrize("limit", [-1.0, -torch.inf, torch.nan])
def test_experts_ffn_with_a_limit_that_is_none(limit: float) -> None:
    experts = experts_of(4, 32, 64)
    arguments = list(flat(torch.randn(5, 64), *choice_of(5, 4, 2), experts))
    with pytest.raises(RuntimeError, match="limit must be 0"):
        OPS.experts_ffn(*arguments[:-1], limit)


@pytest.mark.parametrize("first", [LARGEST, -LARGEST - 1, 1 << 62])
def test_embedding_norm_with_positions_that_no_table_has(first: int) -> None:
    ids, words = torch.zeros(2, 3, dtype=torch.int64), torch.randn(4, 8)
    with pytest.raises((RuntimeError, IndexError), match="position"):
        OPS.embedding_norm(ids, words, None, None, None, words, first, None, None, None, 1e-5)


@pytest.mark.parametrize("sizes", [[1 << 62, 1 << 62, 64], [LARGEST, 65], [-64, 128], [0, 64], []])
def test_linear_split(sizes: list[int]) -> None:
    weight = pack_linear(torch.randn(64, 8), "float32")
    with pytest.raises(RuntimeError, match=r"sizes|input and"):
        OPS.linear_split(torch.randn(3, 8), weight.data, None, None, sizes)


@pytest.mark.parametrize("out_features", [-5, LARGEST, -LARGEST - 1])
def test_linear(out_features: int) -> None:
    nothing = torch.zeros(0, 8, 32, 1)
    with pytest.raises(RuntimeError, match="input and"):
        OPS.linear(torch.randn(3, 8), nothing, None, None, None, out_features, "none")


def test_storages_of_nothing() -> None:
    """Caches without tokens and heads without features are empty, not errors of strides."""
    for shape in ((2, 3, 0, 8), (0, 5), (2, 0, 1)):
        heads = torch.randn(shape)
        assert from_storage(to_storage(heads, torch.int8), torch.float32).shape == heads.shape
    index, multiplier, scale = int4.quantize(torch.randn(3, 0), 32)
    assert (index.shape, multiplier.shape, scale.shape) == ((3, 0), (3, 0), (2, 3))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window": -1}, "window=-1: must be 0 or more"),
        ({"window": 2, "global_keys": 10}, "global_keys=10: must be 0 to 9"),
        ({"global_keys": 1}, "0 if there is no window"),
        ({"global_keys": 1, "window": 2, "is_causal": True}, "0 if there is no window or is_causal"),
    ],
)
def test_windows_of_attention(changed: dict[str, Any], words: str) -> None:
    heads = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=words):
        attention(heads, heads, heads, **changed)
    with pytest.raises(RuntimeError, match=r"window|global_keys"):
        OPS.attention(heads, heads, heads, None, **{"is_causal": False, "scale": None, **changed})


def test_a_weight_that_is_not_packed_has_the_shape_of_a_linears() -> None:
    weight = torch.randn(40, 24)
    for wrong in (weight.T, weight[:, :23], weight[:39], weight[:, ::2]):
        with pytest.raises(RuntimeError, match="does not fit"):
            OPS.linear(torch.randn(3, 24), wrong, None, None, None, 40, "none")


def test_a_weight_without_input_features_gives_the_bias() -> None:
    bias = torch.randn(40)
    for rows in (1, 5, 20):
        given = OPS.linear(torch.randn(rows, 0), torch.randn(40, 0), None, bias, None, 40, "none")
        assert torch.equal(given, bias.expand(rows, 40))


def test_the_widest_window_is_none() -> None:
    heads = torch.randn(1, 2, 9, 8)
    assert torch.equal(attention(heads, heads, heads, window=LARGEST), attention(heads, heads, heads))
