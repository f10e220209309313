"""attention against float64, over shapes, masks, layouts, dtypes and thread counts."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.attention import attention, attention_reference
from hf_cpu_accel.ops.kv_cache import from_storage, to_storage
from hf_cpu_accel.runtime import hardware
from tests.ops.attention_cases import CASES, MASKS, Case, inputs

# float32: relative to the largest value of the output row. bfloat16 adds the rounding of the output, and where the CPU multiplies
# bfloat16 itself, half a unit of 8 bits for every probability, as torch does, and the error of its exponential.
FLOAT32_BOUND = 1e-5
BFLOAT16_ROUNDING = 2.0**-8
PROBABILITY_ROUNDING = 2.0**-8 + 2e-4


def truth_of(case: Case, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return attention_reference(query.double(), key.double(), value.double(), mask, *case.how)


def check(case: Case, seed: int = 0) -> None:
    """One case against float64; raises AssertionError."""
    query, key, value, mask = inputs(case, seed)
    truth = truth_of(case, query, key, value, mask)
    causal, scale, softcap, window, global_keys = case.how
    chosen = {"scale": scale, "softcap": softcap, "window": window, "global_keys": global_keys}
    got = attention(query, key, value, mask=mask, is_causal=causal, **chosen)
    assert got.shape == (case.batch, case.q_len, case.heads, case.value_dim), case
    assert got.dtype == case.dtype, case
    assert got.is_contiguous(), case
    bound = FLOAT32_BOUND * truth.abs().amax(dim=-1, keepdim=True).clamp_min(0.1)
    if case.dtype == torch.bfloat16:
        bound = bound + BFLOAT16_ROUNDING * truth.abs()
        if hardware.native_bf16_is_fast():
            bound = bound + PROBABILITY_ROUNDING * truth_of(case, query, key, value.abs(), mask)
    excess = ((got - truth).abs() / bound).max()
    assert excess <= 1.0, f"{case}: {excess:.2f} times the bound"


def check_attention(seed: int = 0) -> None:
    """All of it in one call, for the test that repeats it on every instruction-set tier."""
    for case in CASES:
        check(case, seed)
        check(replace(case, dtype=torch.bfloat16), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype))


@settings(max_examples=80, deadline=None)
@given(
    case=st.builds(
        Case,
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        q_len=st.integers(1, 70),
        kv_len=st.integers(1, 300),
        head_dim=st.integers(1, 70),
        value_dim=st.integers(1, 70),
        mask=st.sampled_from(MASKS),
        causal=st.booleans(),
        window=st.sampled_from([None, None, 0, 3, 40, 150]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_random_cases(case: Case, group: int, seed: int) -> None:
    check(replace(case, heads=case.kv_heads * group), seed)


@pytest.mark.parametrize("empty", ["batch", "q_len"])
def test_empty_output(empty: str) -> None:
    case = replace(Case(), **{empty: 0})
    query, key, value, _ = inputs(case, 0)
    assert attention(query, key, value).shape == (case.batch, case.q_len, case.heads, case.value_dim)


@pytest.mark.parametrize("causal", [False, True])
def test_without_keys_the_output_is_zero(causal: bool) -> None:
    query, key, value, _ = inputs(Case(kv_len=0), 0)
    assert torch.equal(attention(query, key, value, is_causal=causal), torch.zeros(2, 33, 2, 64))


def test_rows_that_may_attend_nothing_are_zero() -> None:
    query, key, value, _ = inputs(Case(q_len=40, kv_len=10), 0)
    got = attention(query, key, value, is_causal=True)
    assert not got[:, :30].any()
    assert got[:, 30:].any(dim=-1).all()


def test_padding_is_never_read() -> None:
    """Garbage behind the text, NaN included, must not reach the output."""
    query, key, value, _ = inputs(Case(kv_len=300), 0)
    mask = torch.arange(300).expand(2, -1) < 41
    expected = attention(query, key[:, :, :41], value[:, :, :41])
    key[:, :, 41:] = math.nan
    value[:, :, 41:] = math.nan
    assert torch.equal(attention(query, key, value, mask=mask), expected)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_non_finite_inputs_are_not_hidden(where: str, poison: float) -> None:
    case = Case(kv_len=300)
    tensors = dict(zip(("query", "key", "value"), inputs(case, 0)[:3], strict=True))
    tensors[where][1, 1, 5, 3] = poison
    expected = truth_of(case, *tensors.values(), None).isfinite()
    got = attention(*tensors.values()).isfinite()
    assert not expected.all()
    assert torch.equal(got, expected)


def test_large_scores_do_not_overflow() -> None:
    query, key, value, _ = inputs(Case(kv_len=600), 0)
    query = query * 1e4
    truth = attention_reference(query.double(), key.double(), value.double(), None, False, None)
    # Scores of 1e5 have a float32 spacing of 1e-2: only rows with a clear winner have a stable result.
    top = (query.double() @ key.double().transpose(-1, -2) / 8).topk(2, dim=-1).values.transpose(1, 2)
    clear = top[..., 0] - top[..., 1] > 50.0
    assert clear.float().mean() > 0.5
    torch.testing.assert_close(attention(query, key, value).double()[clear], truth[clear], rtol=0, atol=1e-5)


def test_strides_do_not_matter() -> None:
    query, key, value, _ = inputs(Case(kv_len=70), 0)
    expected = attention(query, key, value)
    spaced = [torch.zeros(*x.shape, 2)[..., 0].copy_(x) for x in (query, key, value)]
    assert all(x.stride(-1) == 2 for x in spaced)
    assert torch.equal(attention(*spaced), expected)
    assert torch.equal(attention(query.contiguous(), key.contiguous(), value.contiguous()), expected)
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, query, query)], dim=-1)
    parts = [x.unflatten(-1, (2, 64)).transpose(1, 2) for x in fused.split(128, dim=-1)]
    assert torch.equal(attention(*parts), attention(query, query, query))
    shared = key[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(attention(query, shared, shared), attention(query, key[:, :1], key[:, :1]))


@pytest.mark.parametrize("q_len", [1, 5, 40])
@pytest.mark.parametrize("features", [64, 20])
def test_keys_and_values_in_8_bits(q_len: int, features: int) -> None:
    """As a cache stores them, with strides of its own; against attention over what they stand for."""
    torch.manual_seed(0)
    query = torch.randn(2, 6, q_len, features)
    key, value = (to_storage(torch.randn(2, 3, 90, width), torch.int8)[:, :, 7:] for width in (features, 24))
    key[1, :, 11] = to_storage(torch.zeros(features), torch.int8)
    expected = attention(query, from_storage(key, torch.float32), from_storage(value, torch.float32))
    torch.testing.assert_close(attention(query, key, value), expected, rtol=1e-5, atol=1e-5)
    assert attention(query, key, value).shape == (2, q_len, 6, 24)
    with pytest.raises(ValueError, match=rf"must be \[2, heads, length, {features + 4}\]"):
        attention(query, key[..., :-1], value)


def test_what_is_broken_stays_broken_in_8_bits() -> None:
    heads = torch.tensor([[1.0, torch.inf, 0.0], [torch.nan, 0.0, 0.0], [0.0, 0.0, 0.0], [1e-38, 0.0, 0.0]])
    back = from_storage(to_storage(heads, torch.int8), torch.float32)
    assert back[:2].isnan().all()
    assert torch.equal(back[2:], torch.zeros(2, 3))


def test_masks_that_mean_the_same_give_the_same() -> None:
    query, key, value, mask = inputs(Case(mask="holes", kv_len=290), 0)
    assert mask is not None
    expected = attention(query, key, value, mask=mask)
    added = torch.where(mask, 0.0, -math.inf)
    for same in (
        mask[:, None, None],
        mask[:, None, None].expand(-1, 2, 33, -1).contiguous(),
        added[:, None, None],
        added[:, None, None].double(),
        added.bfloat16()[:, None, None],
        added.t().contiguous().t()[:, None, None],
    ):
        # Not bit for bit: skipped padding shifts the blocks in which keys are summed.
        torch.testing.assert_close(attention(query, key, value, mask=same), expected, rtol=0, atol=1e-6)
    one_key = torch.tensor([0.5]).expand(33, 1)
    assert torch.equal(
        attention(query, key, value, mask=one_key), attention(query, key, value, mask=one_key.expand(33, 290))
    )


@pytest.mark.parametrize(
    "case", [Case(q_len=200), Case(q_len=90, causal=True), Case(heads=8, q_len=3)], ids=str
)
def test_thread_count_does_not_change_the_result(case: Case) -> None:
    query, key, value, _ = inputs(case, 0)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(attention(query, key, value, is_causal=case.causal))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(2, 33, 64)}, "split the heads"),
        ({"key": torch.zeros(2, 2, 33, 63)}, "key of shape"),
        ({"value": torch.zeros(2, 2, 32, 64)}, "value of shape"),
        ({"key": torch.zeros(2, 3, 33, 64), "value": torch.zeros(2, 3, 33, 64)}, "multiple of the key's 3"),
        ({"mask": torch.ones(33, 33, dtype=torch.bool)}, "key padding"),
        ({"mask": torch.zeros(2, 1, 5, 33)}, "broadcastable"),
        ({"softcap": 0.0}, "softcap=0.0: must be positive"),
    ],
)
def test_bad_shapes_are_named(change: dict[str, Any], words: str) -> None:
    query, key, value, _ = inputs(Case(), 0)
    arguments = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(ValueError, match=words):
        attention(**arguments)


def test_an_integer_mask_is_refused() -> None:
    query, key, value, _ = inputs(Case(), 0)
    with pytest.raises(TypeError, match=r"mask\.bool\(\)"):
        attention(query, key, value, mask=torch.ones(2, 33, dtype=torch.long))


@pytest.mark.parametrize(
    "case",
    [Case(), Case(heads=4, q_len=5, mask="right padding"), Case(mask="float per head", causal=True)],
    ids=str,
)
def test_opcheck(case: Case) -> None:
    query, key, value, mask = inputs(case, 0)
    torch.library.opcheck(torch.ops.hf_cpu_accel.attention, (query, key, value, mask, *case.how))


def test_traces_with_symbolic_shapes() -> None:
    def self_attention(hidden: Tensor, mask: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        return attention(heads, heads, heads, mask=mask).flatten(2)

    compiled = torch.compile(self_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 5), (3, 9), (2, 40)):
        hidden = torch.randn(batch, length, 32)
        mask = torch.arange(length).expand(batch, -1) < 4
        torch.testing.assert_close(compiled(hidden, mask), self_attention(hidden, mask), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_below_the_largest_cost_nothing(dtype: torch.dtype) -> None:
    """e^-90 is no normal number, and a CPU takes a hundred times as long for such: Swin hides tokens by adding -100."""
    torch.set_num_threads(1)
    query, key, value = (torch.randn(32, 4, 49, 32, dtype=dtype) for _ in range(3))
    hidden = torch.rand(32, 1, 49, 49) < 0.5

    def seconds(least: float) -> float:
        mask = torch.zeros(32, 1, 49, 49, dtype=dtype).masked_fill(hidden, least)
        times = []
        for _ in range(7):
            begin = time.process_time()
            attention(query, key, value, mask=mask)
            times.append(time.process_time() - begin)
        return min(times)

    assert seconds(-90.0) < 4 * seconds(-1.0)
    # And they are left out as if they were hidden.
    mask = torch.zeros(32, 1, 49, 49, dtype=dtype).masked_fill(hidden, -100.0)
    assert torch.equal(attention(query, key, value, mask=mask), attention(query, key, value, mask=~hidden))


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30, -1e9], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_which_all_keys_have_the_lowest_float(lowest: float, dtype: torch.dtype) -> None:
    """What transformers adds for a row of padding: every key counts the same, and nothing overflows."""
    check_lowest(lowest, dtype)


def check_lowest(lowest: float, dtype: torch.dtype) -> None:
    case = Case(q_len=40, kv_len=70, dtype=dtype)
    query, key, value, _ = inputs(case, 0)
    mask = torch.zeros(1, 1, 40, 70)
    mask[:, :, ::3] = lowest
    mask[:, :, 1, :60] = lowest
    truth = attention_reference(query.float(), key.float(), value.float(), mask, False, None)
    got = attention(query, key, value, mask=mask)
    assert got.isfinite().all()
    bound = 1e-4 if dtype is torch.float32 else 4 * BFLOAT16_ROUNDING
    assert (got.float() - truth).abs().max() <= bound * truth.abs().max()
