"""decoder_layers against its plain-torch reference, over families' layouts, caches, padding, masks, dtypes and thread counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_cpu_accel.ops.decoder.reference import decoder_layers_reference
from hf_cpu_accel.ops.kv_cache import from_storage
from tests.ops.decoder.bounds import bound_of, close
from tests.ops.decoder.call import call_of
from tests.ops.decoder.cases import CROSSES, EXPERTS, GATES, HEAD_NORMS, MASKS, NORMS, VALUE_NORMS, Case

VARIANTS = [
    Case(),
    Case(batch=1, past=0),
    Case(norm="layer_norm", biases=True, gated=False, activation="gelu", rotary_dim=0),  # GPT-2
    Case(norm="layer_norm", biases=True, gated=False, parallel=True, interleaved_heads=True, rotary_dim=4),
    Case(kv_heads=1, parallel=True, gated=False, alibi=True, rotary_dim=0),  # Falcon
    Case(heads=6, kv_heads=2, interleaved_heads=True, parallel=True),  # Falcon 40B
    Case(heads=16, kv_heads=1),
    Case(heads=14, kv_heads=2, biases=True),  # Qwen 2.5
    Case(heads=5, kv_heads=5, head_dim=20, value_dim=24, rotary_dim=20),
    Case(norms="before and post", softcap=5.0, activation="gelu_tanh", window=7),  # Gemma 2
    Case(norms="post", head_norm="all"),  # OLMo 2
    Case(norms="out", norm="layer_norm", biases=True),  # OPT-350m
    Case(norms="none"),
    Case(head_norm="shared"),  # Qwen 3
    Case(head_norm="own", norm="layer_norm", rotary_interleaved=True, parallel=True),  # Cohere
    Case(head_norm="all", norm="layer_norm", biases=True),
    Case(rotary_interleaved=True, rotary_dim=8, half_tables=True),  # GPT-J
    Case(half_tables=True, sinks=True, window=5),  # gpt-oss
    Case(residual_scale=0.22),  # Granite
    Case(residual_scale=0.22, parallel=True, norms="before and post"),
    Case(window=4, forget=True, past=30),
    Case(start=True),
    Case(start=True, window=4, forget=True, past=30),
    Case(rows=True, batch=4),
    Case(rows=True, batch=3, past=30, forget=True, start=True),
    *(Case(mask=mask, forget=mask == "bool", past=12) for mask in MASKS[1:]),
    Case(dtype=torch.bfloat16),
    Case(cache=torch.bfloat16, past=40),
    Case(cache=torch.int8, past=40),
    Case(
        cache=torch.int8, heads=5, kv_heads=5, head_dim=20, value_dim=24, rotary_dim=20, window=7, softcap=5.0
    ),
    Case(cache=torch.int8, rows=True, batch=3, past=30, forget=True, window=4, start=True),
    Case(cache=torch.int8, weights="int4", features=160, head_dim=64, value_dim=64, sinks=True, alibi=True),
    Case(weights="bfloat16", cache=torch.bfloat16, dtype=torch.bfloat16),
    *(
        Case(weights=kind, features=160, head_dim=32, value_dim=32)
        for kind in ("int8", "int8-weight", "int4")
    ),
    *(Case(cross=cross, norms=norms) for cross in CROSSES[1:] for norms in ("before", "out")),  # T5, BART
    Case(cross="beams", batch=5, rows=True, norm="layer_norm", norms="out", biases=True),
    Case(cross="beams, padding", batch=3, start=True),
    *(Case(relative=count, rotary_dim=0, kv_heads=4) for count in (1, 5, 40)),  # T5
    Case(
        relative=9,
        rotary_dim=0,
        cross="beams",
        batch=4,
        rows=True,
        forget=True,
        window=4,
        past=30,
        softcap=3.0,
    ),
    Case(cross="holes", cache=torch.int8),
    *(Case(experts=experts, layers=3) for experts in EXPERTS[1:]),
    Case(experts="gated shared", norms="post", start=True),
    Case(experts="shared", norms="none", start=True, dtype=torch.bfloat16),
    Case(experts="shared", norms="none", start=True, parallel=True),
    Case(experts="softmax", parallel=True, residual_scale=0.3, biases=True),
    Case(experts="renormalized", norms="out", gated=False),
    *(Case(experts="gated shared", weights=kind) for kind in ("bfloat16", "int8", "int8-weight", "int4")),
    Case(cross="padding", start=True, biases=True, norm="layer_norm", residual_scale=0.5),
    *(Case(ffn=False, norms=norms, layers=layers) for norms in NORMS for layers in (2, 4)),  # Nemotron-H
    Case(ffn=False, cross="padding", start=True, layers=3),
    Case(ffn=False, residual_scale=0.3, dtype=torch.bfloat16, experts="shared", start=True),
    Case(gate="beside", head_norm="shared", rotary_dim=4),  # Qwen 3.5
    Case(gate="beside", head_norm="all", interleaved_heads=True, heads=6),
    Case(gate="sigmoid", norms="before and post", start=True),  # AFMoE
    Case(gate="softplus head", heads=5, kv_heads=1, experts="shared"),  # Laguna
    Case(gate="softplus", heads=5, kv_heads=5, head_dim=20, value_dim=24, rotary_dim=20, cross="holes"),
    Case(gate="head", dtype=torch.bfloat16, weights="bfloat16", cache=torch.bfloat16),
    Case(sub_norm="all", activation="relu2"),  # BitNet
    Case(
        sub_norm="all", norm="layer_norm", biases=True, gated=False, activation="gelu", intermediate=160
    ),  # Kosmos
    Case(sub_norm="shared", gate="sigmoid", experts="gated shared"),
    Case(sub_norm="own", gate="head", residual_scale=0.3, parallel=True, value_dim=33, rows=True),
    *(Case(value_norm=kind, head_norm="shared", kv_heads=kv) for kind in VALUE_NORMS[1:] for kv in (1, 2)),
    Case(value_norm="bare", norm="layer_norm", value_dim=33, cache=torch.int8),
    Case(shares_keys=True, layers=4, start=True),
    Case(shares_keys=True, layers=4, window=4, forget=True, past=30, kv_heads=1, cache=torch.bfloat16),
    Case(shares_keys=True, layers=3, rows=True, batch=3, interleaved_heads=True, head_norm="all"),
    Case(output_scale=0.3, residual_scale=0.5),
    Case(output_scale=0.3, parallel=True, experts="shared", layers=3, dtype=torch.bfloat16),
    *(Case(per_layer=size, norms=norms, start=True, layers=3) for size in (1, 20) for norms in NORMS),
    *(
        Case(
            per_layer=64,
            value_norm="bare",
            head_norm="shared",
            shares_keys=True,
            output_scale=0.7,
            norms="before and post",
            layers=3,
            window=7,
            kv_heads=1,
            weights=kind,
            features=160,
            activation="gelu_tanh",
            dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32,
        )
        for kind in ("float32", "bfloat16", "int8", "int8-weight", "int4")
    ),  # Gemma 4
    Case(per_layer=24, experts="gated shared", layers=3, output_scale=2.0),
    Case(per_layer=24, cross="padding", parallel=False, ffn=False, layers=4, residual_scale=0.5),
    *(
        Case(gate="beside", sub_norm="all", weights=kind, features=160)
        for kind in ("bfloat16", "int8", "int8-weight", "int4")
    ),
]
CASES = [
    *VARIANTS,
    *(replace(case, q_len=q_len) for case in VARIANTS for q_len in (3, 23)),
    Case(batch=1, past=700),  # keys in parts
    Case(batch=1, past=700, kv_heads=1, heads=3, sinks=True, cache=torch.bfloat16),
    Case(batch=1, past=700, kv_heads=1, heads=3, cache=torch.int8),
    Case(batch=1, past=900, kv_heads=1, heads=4, window=600, softcap=3.0, alibi=True),
    Case(batch=1, past=600, kv_heads=1, heads=2, q_len=5, start=True),
    Case(batch=2, past=300, q_len=40, window=50),
    Case(batch=2, past=300, q_len=40, relative=128),
    Case(batch=20, q_len=1, past=5),
]


class Ties(TorchFunctionMode):
    """Watches experts being chosen: `first` is the first token that rounding may send to another expert."""

    def __init__(self, near: float, tokens: Tensor) -> None:
        super().__init__()
        self.near, self.tokens, self.first = near, tokens, tokens.shape[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.topk:
            scores, count = args
            values = torch.topk(scores, count + 1).values
            tied = (values[..., -2] - values[..., -1] <= self.near) & self.tokens
            self.first = min([self.first, *tied.any(dim=0).nonzero().flatten().tolist()])
        return func(*args, **(kwargs or {}))


def check(case: Case) -> None:
    call, bound = call_of(case), bound_of(case)
    tokens = torch.ones(case.batch, case.q_len, dtype=torch.bool)
    if call.start is not None:
        tokens = torch.arange(case.past, case.past + case.q_len) >= call.start[:, None]
    with Ties(bound, tokens) as ties:
        expected, expected_keys, expected_values = call.reference()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            output, keys, values = call.run()
            assert output.dtype is case.dtype
            assert output.is_contiguous()
            assert (output[~tokens] == 0).all()
            what, caches = f"{case}, {count} threads", []
            for cache, before, wanted, past in (
                *zip(keys, call.keys, expected_keys, call.past, strict=True),
                *zip(values, call.values, expected_values, call.past, strict=True),
            ):
                after, old, new = (from_storage(x, torch.float32) for x in (cache, before, wanted))
                assert torch.equal(after[~torch.isnan(old)], old[~torch.isnan(old)])
                caches.append((after, new, torch.isnan(old), past))

            def agree(until: int) -> None:
                """Up to so many tokens: what goes to another expert changes those after it, too."""
                close(output[:, :until], expected[:, :until], bound, what)  # noqa: B023
                for parts in caches:  # noqa: B023
                    after, new, where = (part[:, :, : parts[3] + until] for part in parts[:3])
                    close(after, new, bound, f"cache of {case}", where)

            try:
                agree(case.q_len)
            except AssertionError:
                if ties.first == case.q_len:
                    raise
                agree(ties.first)
    finally:
        torch.set_num_threads(threads)


def check_decoder_layers(seed: int) -> None:
    """Some of the cases, others for each seed; for the tiers, each in a process of its own."""
    torch.manual_seed(seed)
    for case in CASES[seed % 4 :: 4]:
        check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    torch.manual_seed(0)
    check(case)


def test_layers_share_the_keys_of_an_earlier_one() -> None:
    torch.manual_seed(0)
    call = call_of(
        Case(shares_keys=True, layers=4, head_norm="shared", value_norm="bare", batch=3, start=True)
    )
    shared = [*call.keys[:2], *call.keys[:2]], [*call.values[:2], *call.values[:2]]
    copies = [[x.clone() for x in cache[:2]] * 2 for cache in shared]
    expected = decoder_layers_reference(*call.flat(*copies))
    output = torch.ops.hf_cpu_accel.decoder_layers(*call.flat(*shared))
    torch.testing.assert_close(output, expected, atol=2e-4, rtol=2e-4)
    for ours, theirs in zip((*shared[0], *shared[1]), (*copies[0], *copies[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4, equal_nan=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.builds(
        lambda group, experts, **sizes: Case(
            heads=group * sizes["kv_heads"],
            experts="none" if sizes["features"] % 32 else experts,
            **sizes,
        ),
        group=st.integers(1, 9),
        kv_heads=st.integers(1, 3),
        batch=st.integers(1, 4),
        q_len=st.sampled_from([1, 1, 2, 9, 40]),
        past=st.integers(0, 200),
        features=st.integers(8, 80) | st.sampled_from([32, 64, 96]),
        head_dim=st.sampled_from([16, 17, 64, 80]),
        value_dim=st.sampled_from([16, 33, 64]),
        intermediate=st.sampled_from([32, 96]),
        cache=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
        norm=st.sampled_from(["rms_norm", "layer_norm"]),
        norms=st.sampled_from(NORMS),
        head_norm=st.sampled_from(HEAD_NORMS),
        interleaved_heads=st.booleans(),
        gated=st.booleans(),
        window=st.sampled_from([None, 1, 20]),
        sinks=st.booleans(),
        alibi=st.booleans(),
        relative=st.sampled_from([0, 1, 30]),
        rotary_dim=st.sampled_from([0, 10, 16]),
        start=st.booleans(),
        rows=st.booleans(),
        mask=st.sampled_from(MASKS),
        cross=st.sampled_from(CROSSES),
        experts=st.sampled_from(EXPERTS),
        gate=st.sampled_from(GATES),
        sub_norm=st.sampled_from(HEAD_NORMS),
        ffn=st.booleans(),
        value_norm=st.sampled_from(VALUE_NORMS),
        shares_keys=st.booleans(),
        layers=st.sampled_from([2, 2, 4]),
        per_layer=st.sampled_from([0, 1, 40]),
        output_scale=st.sampled_from([1.0, 0.4]),
    )
)
def test_random_shapes(case: Case) -> None:
    torch.manual_seed(1)
    check(case)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        batch=st.integers(1, 4),
        q_len=st.sampled_from([1, 2, 9, 40]),
        past=st.integers(0, 40),
        features=st.sampled_from([32, 64, 96]),
        norms=st.sampled_from(NORMS),
        start=st.booleans(),
        rows=st.booleans(),
        residual_scale=st.sampled_from([1.0, 0.3]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        experts=st.sampled_from(EXPERTS[1:]),
    )
)
def test_random_mixtures(case: Case) -> None:
    torch.manual_seed(1)
    check(case)
