"""encoder_layer against its plain-torch reference, over shapes, layouts, padding, masks, dtypes and thread counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_cpu_accel.ops.encoder_layer import (
    EncoderInputs,
    EncoderWeights,
    NormWeights,
    RelativePositions,
    encoder_layer,
)
from hf_cpu_accel.packing.linear import pack_linear
from tests.ops.encoder.call import masks_of, positions_of, reference, weights_of
from tests.ops.encoder.cases import CASES, MASKS, PADDINGS, Case

# Largest difference over the largest value of the reference. int8: values near the middle between two steps may be rounded to
# either side.
# Narrow values between the steps are rounded to bfloat16, which may move int8 ones to the next step.
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 2e-2, "int4": 2e-2}
BFLOAT16_ROUNDING = 2.0**-8


def check(case: Case, hidden_states: Tensor | None = None) -> None:
    weights, (padding, mask), positions = weights_of(case), masks_of(case), positions_of(case)
    if hidden_states is None:
        hidden_states = torch.randn(case.batch, case.length, case.features).to(case.dtype)
    expected = reference(hidden_states, weights, padding, mask, **positions).double()
    bound = BOUNDS[case.weights]
    bound += BFLOAT16_ROUNDING if case.bf16_intermediates else 0.0
    bound += BFLOAT16_ROUNDING if case.dtype is torch.bfloat16 else 0.0
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(encoder_layer(hidden_states, weights, padding=padding, mask=mask, **positions))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert result.dtype is case.dtype
        assert result.is_contiguous()
        error = (result.double() - expected).abs().amax() / expected.abs().amax().clamp(min=1e-3)
        assert error <= bound, f"{case}: {error:.2e} > {bound:.2e}"
        # Which tokens share a tile may depend on the threads, and with it the order of sums on some tiers; no more than that.
        apart = (result.double() - results[0].double()).abs().amax() / expected.abs().amax().clamp(min=1e-3)
        assert apart <= bound / 2, f"{case}: {apart:.2e} between numbers of threads"


def check_encoder_layer(seed: int) -> None:
    """All cases; for the tiers, each in a process of its own."""
    torch.manual_seed(seed)
    for case in CASES:
        check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    torch.manual_seed(0)
    check(case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        batch=st.integers(1, 5),
        length=st.integers(1, 60),
        features=st.integers(8, 80),
        heads=st.integers(1, 3),
        head_size=st.sampled_from([32, 64]),
        intermediate=st.integers(1, 140),
        weights=st.sampled_from(["float32", "bfloat16"]),
        pre_norm=st.booleans(),
        activation=st.sampled_from(["none", "gelu", "quick_gelu", "tanh"]),
        mask=st.sampled_from(["none", *PADDINGS, *MASKS]),
        norm=st.sampled_from(["layer_norm", "rms_norm"]),
        relative=st.sampled_from([0, 0, 3, 40]),
        rotary=st.sampled_from([0, 0, 32]),
    )
)
def test_random_shapes(case: Case) -> None:
    torch.manual_seed(1)
    check(case)


def test_not_contiguous() -> None:
    torch.manual_seed(0)
    case = Case()
    wide = torch.randn(case.batch, case.length, 2, case.features)
    check(case, wide[:, :, 1])
    check(case, torch.randn(case.length, case.batch, case.features).transpose(0, 1))


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_padding_changes_no_token(weights: str) -> None:
    """A sequence gives the same alone and in a padded batch, whatever stands in the padding."""
    torch.manual_seed(0)
    case = Case(batch=3, length=40, weights=weights)
    layer = weights_of(case)
    lengths = torch.tensor([40, 7, 23])
    padding = torch.arange(case.length) < lengths[:, None]
    hidden_states = torch.randn(case.batch, case.length, case.features)
    hidden_states[~padding] = torch.nan
    together = encoder_layer(hidden_states, layer, padding=padding)
    assert (together[~padding] == 0).all()
    for row, length in enumerate(lengths.tolist()):
        alone = encoder_layer(hidden_states[row : row + 1, :length], layer)
        torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=1e-5)


def test_many_small_probabilities_count() -> None:
    """One key gets two thirds of the attention, 500 others a thousandth of that each: in 8 bits they would be zeros."""
    torch.manual_seed(0)
    features, length = 64, 501
    key = torch.zeros(features, features)
    key[0, 0] = 1.0  # the first feature, which is large in the first token only
    query_bias = torch.zeros(3 * features)
    query_bias[0] = 6.9
    hidden_states = 0.5 * torch.randn(1, length, features) + torch.linspace(-1, 1, features)
    hidden_states[..., 0] = 0.0
    hidden_states[0, 0] = torch.eye(features)[0] * 30
    norm = NormWeights(None, None, 1e-5)
    weights = EncoderWeights(
        qkv=pack_linear(torch.cat([torch.zeros(features, features), key, torch.eye(features)]), "int8"),
        qkv_bias=query_bias,
        qkv_order=(0, 1, 2),
        head_size=features,
        attention_scale=1 / 7.9,  # the first token's key is about 7.9 after the norm
        output=pack_linear(torch.eye(features), "int8"),
        output_bias=None,
        attention_norm=norm,
        up=pack_linear(torch.zeros(features, features), "int8"),
        up_bias=None,
        down=pack_linear(torch.zeros(features, features), "int8"),
        down_bias=None,
        activation="none",
        ffn_norm=norm,
        pre_norm=True,
        bf16_intermediates=True,
    )
    attended = encoder_layer(hidden_states, weights) - hidden_states
    expected = reference(hidden_states, weights) - hidden_states
    assert 4.0 < expected[0, 1, 0] < 6.5  # of 7.9: the share of the first token
    others = slice(1, features)
    assert (attended - expected)[..., others].abs().max() <= 0.1 * expected[..., others].abs().max()


def test_traces() -> None:
    torch.manual_seed(0)
    case = replace(Case(), mask="right padding")
    weights, (padding, _) = weights_of(case), masks_of(case)
    hidden_states = torch.randn(case.batch, case.length, case.features)
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.encoder_layer.default,
        (hidden_states, *EncoderInputs(padding), *weights.arguments()),
    )
    gated = replace(
        Case(), norm="rms_norm", pre_norm=True, gated=True, layer_scale=True, rotary=16, relative=3
    )
    positions = positions_of(gated)
    inputs = EncoderInputs(padding, None, positions["relative"], *positions["rotary"])
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.encoder_layer.default,
        (hidden_states, *inputs, *weights_of(gated).arguments()),
    )
    with_positions = positions_of(replace(case, positions="keys and queries"))["positions"]
    inputs = EncoderInputs(padding)._replace(
        position_keys=with_positions.keys,
        position_queries=with_positions.queries,
        position_index=with_positions.distances,
    )
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.encoder_layer.default, (hidden_states, *inputs, *weights.arguments())
    )


def test_bad_arguments() -> None:
    weights = weights_of(Case())
    hidden_states = torch.randn(2, 5, 64)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        encoder_layer(torch.randn(2, 5, 63), weights)
    with pytest.raises(ValueError, match=r"must be \[batch, length, features\]"):
        encoder_layer(torch.randn(5, 64), weights)
    padding = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"padding of shape \(2, 4\)"):
        encoder_layer(hidden_states, weights, padding=padding[:, :4])
    with pytest.raises(RuntimeError, match="an odd number"):
        encoder_layer(hidden_states, weights, relative=torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="excludes a window"):
        encoder_layer(hidden_states, weights, window=2, relative=torch.randn(4, 7))
    with pytest.raises(RuntimeError, match="cos and sin must be"):
        encoder_layer(hidden_states, weights, rotary=(torch.ones(1, 5, 18), torch.ones(1, 5, 18)))
    with pytest.raises(RuntimeError, match="gains go with norms that come before"):
        encoder_layer(hidden_states, replace(weights, ffn_layer_scale=torch.ones(64)))
    with pytest.raises(RuntimeError, match="may be missing"):
        encoder_layer(hidden_states, replace(weights, attention_norm=None))
    with pytest.raises(RuntimeError, match="does not fit"):
        encoder_layer(hidden_states, replace(weights, gated=True))
    with pytest.raises(ValueError, match="activation='swish'"):
        encoder_layer(hidden_states, replace(weights, activation="swish"))
    with pytest.raises(RuntimeError, match="permutation"):
        encoder_layer(hidden_states, replace(weights, qkv_order=(0, 0, 1)))
    with pytest.raises(RuntimeError, match="multiple of head_size"):
        encoder_layer(hidden_states, replace(weights, head_size=5))
    with pytest.raises(RuntimeError, match="does not fit"):
        encoder_layer(hidden_states, replace(weights, down=weights.up))


def test_positions_that_do_not_fit() -> None:
    weights, hidden_states = weights_of(Case()), torch.randn(2, 5, 64)
    keys, index = torch.randn(7, 64), torch.zeros(9, dtype=torch.int32)
    for bad, message in (
        (RelativePositions(keys, None, index[:8]), "position_index"),
        (RelativePositions(None, None, index), "position_keys or position_queries"),
        (RelativePositions(keys, keys[:, :63], index), r"must be \[rows, 64\]"),
        (RelativePositions(keys, keys, index + 7), "rows from 0 to 6"),
        (RelativePositions(keys, keys[:3], index + 3), "rows from 0 to 2"),
        (RelativePositions(keys.half(), None, index), "position_keys must be float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            encoder_layer(hidden_states, weights, positions=bad)
    with pytest.raises(RuntimeError, match="exclude"):
        encoder_layer(hidden_states, weights, positions=RelativePositions(keys, keys, index), window=2)


def test_threads_that_torch_does_not_run_together() -> None:
    """Then one thread does all, and nobody waits for a thread that does not come."""
    torch.manual_seed(0)
    weights, hidden_states = weights_of(Case()), torch.randn(2, 19, 64)
    expected = encoder_layer(hidden_states, weights)
    try:
        torch.ops.hf_cpu_accel.run_together(False)
        assert torch.equal(encoder_layer(hidden_states, weights), expected)
    finally:
        torch.ops.hf_cpu_accel.run_together(True)


def test_several_callers_at_once() -> None:
    """Every caller has a team of its own."""
    torch.manual_seed(0)
    weights, hidden_states = weights_of(Case(length=70)), torch.randn(2, 70, 64)
    expected = encoder_layer(hidden_states, weights)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: encoder_layer(hidden_states, weights), range(40)))
    assert all(torch.equal(result, expected) for result in results)


def test_rows_that_do_not_fit() -> None:
    case = Case(batch=2, length=12, scattered=6, pre_norm=True)
    weights, hidden_states = weights_of(case), torch.randn(2, 12, case.features)
    rows = positions_of(case)["rows"]
    with pytest.raises(RuntimeError, match="once"):
        encoder_layer(hidden_states, weights, rows=torch.zeros_like(rows))
    with pytest.raises(RuntimeError, match="once"):
        encoder_layer(hidden_states, weights, rows=rows + 1)
    with pytest.raises(RuntimeError, match="int32"):
        encoder_layer(hidden_states, weights, rows=rows[:2].contiguous())
    with pytest.raises(RuntimeError, match="exclude"):
        encoder_layer(hidden_states, weights, rows=rows, padding=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="share"):
        encoder_layer(hidden_states, weights, rows=rows, mask=torch.zeros(3, 1, 6, 6))


def test_only_scattered_sequences_take_masks_in_turn() -> None:
    case = Case(batch=4, length=6)
    with pytest.raises(RuntimeError, match="share"):
        encoder_layer(torch.randn(4, 6, case.features), weights_of(case), mask=torch.zeros(2, 1, 6, 6))
