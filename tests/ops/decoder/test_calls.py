"""Calls of decoder_layers that must give the same: layers and tokens apart or together, whatever the strides and the padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_cpu_accel.ops.decoder.layers import bind, decoder_layers
from tests.ops.decoder.bounds import bound_of, close
from tests.ops.decoder.call import call_of
from tests.ops.decoder.cases import Case, layers_of


def test_not_contiguous() -> None:
    """Hidden states and tables of any strides; caches whose heads lie inside of positions."""
    torch.manual_seed(0)
    case = Case(batch=3, q_len=4, past=6)
    call = call_of(case)
    wide = torch.randn(case.q_len, case.batch, 2 * case.features)
    call.hidden_states = wide[..., : case.features].transpose(0, 1)
    call.rotary = [tuple(torch.stack([table, table], dim=1)[:, 1] for table in call.rotary[0])]
    expected, expected_keys, _ = call.reference()
    keys, values = (
        [x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in cache]
        for cache in (call.keys, call.values)
    )
    output = torch.ops.hf_cpu_accel.decoder_layers(*call.flat(keys, values))
    close(output, expected, bound_of(case), "strided")
    for cache, before, wanted in zip(keys, call.keys, expected_keys, strict=True):
        close(cache, wanted, bound_of(case), "cache", torch.isnan(before))


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_layers_one_by_one_give_the_same(weights: str) -> None:
    torch.manual_seed(0)
    case = Case(layers=3, norms="before and post", weights=weights, q_len=5, cross="padding")
    parts, call = layers_of(case), call_of(case)
    call.layers = bind(parts)
    together, keys, _ = call.run()
    x = call.hidden_states
    for number, part in enumerate(parts):
        single = replace(
            call,
            hidden_states=x,
            layers=bind([part]),
            keys=call.keys[number : number + 1],
            values=call.values[number : number + 1],
            cross_keys=call.cross_keys[number : number + 1],
            cross_values=call.cross_values[number : number + 1],
            past=call.past[:1],
        )
        x, own_keys, _ = single.run()
        torch.testing.assert_close(own_keys[0], keys[number], equal_nan=True)
    torch.testing.assert_close(x, together)


def test_layers_of_different_sizes() -> None:
    torch.manual_seed(0)
    wide, narrow = Case(layers=1, q_len=3), Case(layers=1, q_len=3, heads=2, kv_heads=1, intermediate=32)
    calls = [call_of(case) for case in (narrow, wide, narrow)]
    parts = [layers_of(case)[0] for case in (narrow, wide, narrow)]
    keys, values = ([cache for call in calls for cache in getattr(call, name)] for name in ("keys", "values"))
    call = replace(calls[0], layers=bind(parts), keys=keys, values=values, past=[11] * 3)
    close(call.run()[0], call.reference()[0], bound_of(wide), "different sizes")


def test_decoding_continues_prefill() -> None:
    """Token by token gives what one call gives, with padding on the left and sequences of several lengths."""
    torch.manual_seed(0)
    case = Case(batch=3, q_len=12, past=0, start=True, window=5)
    call = call_of(case)
    call.start = torch.tensor([0, 7, 3], dtype=torch.int32)
    whole, _, _ = call.run()
    keys, values = ([x.clone() for x in cache] for cache in (call.keys, call.values))
    for first, last in ((0, 8), (8, 9), (9, 12)):
        part = decoder_layers(
            call.hidden_states[:, first:last],
            call.layers,
            keys,
            values,
            [first, first],
            rotary=[(cos[:, first:last], sin[:, first:last]) for cos, sin in call.rotary],
            start=call.start,
        )
        torch.testing.assert_close(part, whole[:, first:last], rtol=1e-5, atol=1e-5)


def test_padding_changes_no_token() -> None:
    """Whatever stands in the padding and behind the cache's tokens."""
    torch.manual_seed(0)
    call = call_of(Case(batch=2, q_len=9, past=0, start=True))
    call.start = torch.tensor([4, 9], dtype=torch.int32)
    expected, _, _ = call.run()
    call.hidden_states[0, :4] = torch.nan
    call.hidden_states[1] = torch.nan
    assert torch.equal(call.run()[0], expected)
    assert (expected[1] == 0).all()


def test_traces() -> None:
    torch.manual_seed(0)
    call = call_of(Case(mask="bool", q_len=3, cross="padding"))
    torch.library.opcheck(
        torch.ops.hf_cpu_accel.decoder_layers.default,
        call.flat([x.nan_to_num() for x in call.keys], [x.nan_to_num() for x in call.values]),
    )
