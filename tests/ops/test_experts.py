"""experts_ffn against its plain-torch reference, over widths, dtypes, activations, layouts and thread counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.experts import ExpertWeights, experts_ffn, experts_reference
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import pack_linear, pack_stack

# Largest difference over the largest value of the reference, as in test_decoder_layers.py.
BOUNDS = {
    "float32": 1e-5,
    "bfloat16": 1e-2,
    "int8": 3e-2,
    "int8-weight": 1e-2,
    "int4": 5e-2,
    "affine8": 1e-2,
    "affine4": 1e-2,
}


def experts_of(
    count: int,
    intermediate: int,
    features: int,
    dtype: str = "float32",
    activation: str = "silu",
    gated: bool = True,
    biases: bool = False,
    limit: float = 0.0,
) -> ExpertWeights:
    width = (1 + gated) * intermediate
    up = pack_stack(torch.randn(count, width, features) / features**0.5, count, dtype)
    down = pack_stack(torch.randn(count, features, intermediate) / intermediate**0.5, count, dtype)
    up_bias, down_bias = (0.3 * torch.randn(count * size) if biases else None for size in (width, features))
    return ExpertWeights(count, up, up_bias, down, down_bias, activation, gated, limit)


def choice_of(tokens: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Some experts are in demand and others get no token."""
    demand = torch.rand(tokens, count) * torch.rand(count)
    return demand.topk(top_k).indices, torch.rand(tokens, top_k)


def flat(x: Tensor, index: Tensor, weights: Tensor, e: ExpertWeights) -> tuple[object, ...]:
    packed = (e.up.data, e.up.scale, e.up_bias, e.down.data, e.down.scale, e.down_bias)
    return (x, index, weights, *packed, e.experts, e.intermediate_features, e.gated, e.activation, e.limit)


def check(experts: ExpertWeights, tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(tokens, experts.features).to(dtype)
    index, weights = choice_of(tokens, experts.experts, top_k)
    weights = weights.to(dtype)
    expected = experts_reference(*flat(x, index, weights, experts)).double()
    bound = BOUNDS[experts.up.dtype] + 2.0**-8 * (dtype is torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            output = experts_ffn(x, index, weights, experts)
            assert output.dtype is dtype
            assert output.is_contiguous()
            error = (output.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            assert error <= bound, f"{experts.up.dtype} {tuple(index.shape)}, {count} threads: {error:.1e}"
    finally:
        torch.set_num_threads(threads)


def check_experts(seed: int) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    torch.manual_seed(seed)
    for dtype in BOUNDS:
        for tokens, top_k in ((1, 2), (3, 4), (40, 3)):
            check(experts_of(6, 96, 64, dtype), tokens, top_k)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 200])
def test_dtypes(dtype: str, tokens: int) -> None:
    torch.manual_seed(0)
    check(experts_of(7, 96, 160, dtype, biases=True), tokens, 3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_activations(activation: str, gated: bool) -> None:
    torch.manual_seed(0)
    check(experts_of(4, 32, 64, activation=activation, gated=gated), 9, 2)


def test_limit() -> None:
    torch.manual_seed(0)
    for dtype in BOUNDS:
        check(experts_of(4, 32, 64, dtype, activation="quick_gelu", biases=True, limit=0.7), 9, 2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 20),
    intermediate=st.sampled_from([32, 96, 160]),
    features=st.sampled_from([32, 64, 224]),
    tokens=st.integers(0, 70),
    top_k=st.integers(1, 5),
    weights=st.sampled_from(list(BOUNDS)),
    biases=st.booleans(),
    gated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_random_shapes(
    count: int,
    intermediate: int,
    features: int,
    tokens: int,
    top_k: int,
    weights: str,
    biases: bool,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    if tokens:
        check(
            experts_of(count, intermediate, features, weights, "gelu", gated, biases),
            tokens,
            min(top_k, count),
            dtype,
        )


def test_many_rows_of_one_expert() -> None:
    """More than stay in the cache at once."""
    torch.manual_seed(0)
    experts = experts_of(2, 64, 2048, "bfloat16")
    check(experts, 700, 1)


def test_tokens_do_not_see_each_other() -> None:
    """What a token gets does not depend on who else goes to its experts, and an expert that is named twice counts twice."""
    torch.manual_seed(0)
    experts = experts_of(5, 96, 64)
    x, (index, weights) = torch.randn(20, 64), choice_of(20, 5, 2)
    together = experts_ffn(x, index, weights, experts)
    alone = torch.cat(
        [experts_ffn(x[t : t + 1], index[t : t + 1], weights[t : t + 1], experts) for t in range(20)]
    )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    twice = experts_ffn(x, index[:, :1].expand(-1, 2), weights, experts)
    torch.testing.assert_close(twice, experts_ffn(x, index[:, :1], weights.sum(1, keepdim=True), experts))


def test_not_contiguous() -> None:
    torch.manual_seed(0)
    experts = experts_of(4, 32, 64)
    x, (index, weights) = torch.randn(9, 64), choice_of(9, 4, 2)
    expected = experts_ffn(x, index, weights, experts)
    spaced = torch.randn(9, 128)[:, ::2].copy_(x)
    transposed = index.T.contiguous().T, weights.T.contiguous().T
    assert torch.equal(experts_ffn(spaced, *transposed, experts), expected)


def test_traces() -> None:
    torch.manual_seed(0)
    experts = experts_of(4, 32, 64, "int8")
    arguments = flat(torch.randn(5, 64), *choice_of(5, 4, 2), experts)
    torch.library.opcheck(torch.ops.hf_cpu_accel.experts_ffn.default, arguments)


def test_bad_arguments() -> None:
    experts = experts_of(4, 32, 64)
    x, (index, weights) = torch.randn(9, 64), choice_of(9, 4, 2)
    with pytest.raises(ValueError, match=r"must be \[tokens, 64\]"):
        experts_ffn(x[:, :63], index, weights, experts)
    with pytest.raises(ValueError, match=r"both must be \[9, 1 to 4\]"):
        experts_ffn(x, index[:8], weights, experts)
    with pytest.raises(ValueError, match=r"both must be \[9, 1 to 4\]"):
        experts_ffn(x, index[:, :0], weights[:, :0], experts)
    with pytest.raises(RuntimeError, match="expert_index names expert 4 of 4"):
        experts_ffn(x, index + 4 - index.max(), weights, experts)
    with pytest.raises(RuntimeError, match="expert_index must be int64"):
        experts_ffn(x, index.int(), weights, experts)
    with pytest.raises(ValueError, match="activation='swish'"):
        experts_ffn(x, index, weights, replace(experts, activation="swish"))
    with pytest.raises(ValueError, match="down has 256 output features: must be 64 for each of 3 experts"):
        experts_ffn(
            x, index, weights, replace(experts, experts=3, up=pack_linear(torch.randn(192, 64), "float32"))
        )
    with pytest.raises(ValueError, match=r"limit=2\.0"):
        experts_ffn(x, index, weights, replace(experts_of(4, 32, 64, gated=False), limit=2.0))
    with pytest.raises(ValueError, match="must be a multiple of 32 to be stacked"):
        pack_stack([torch.randn(40, 64)], 1, "float32")
