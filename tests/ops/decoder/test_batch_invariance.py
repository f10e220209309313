"""A token of a decoder gets the same bits however many others are computed with it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.decoder.call import Call, call_of
from tests.ops.decoder.cases import Case

FEW = 16  # queries


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


CASES = [
    Case(),
    Case(weights="bfloat16", dtype=torch.bfloat16, cache=torch.bfloat16),
    Case(weights="int8", cache=torch.int8),
    Case(weights="int4", cache=torch.bfloat16, heads=6, kv_heads=2),
    Case(heads=4, kv_heads=4, head_dim=80, value_dim=80, biases=True, norm="layer_norm", gated=False),
    Case(heads=8, kv_heads=1, head_dim=128, value_dim=128, cache=torch.bfloat16),
    Case(window=40, sinks=True, softcap=20.0),
    Case(alibi=True, parallel=True, rotary_dim=0),
    Case(relative=32, norms="post", residual_scale=0.3),
    Case(mask="bool", norms="before and post"),
    Case(experts="softmax", weights="bfloat16"),
    Case(experts="gated shared", weights="int8"),
    Case(head_norm="shared", gate="sigmoid", value_norm="bare"),
    Case(cross="padding", cache=torch.bfloat16),
    Case(per_layer=8, output_scale=0.7),
]


def step_by_step(call: Call) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return what `call.run()` returns, from a call for each token."""
    outputs, keys, values = [], call.keys, call.values
    q_len = call.hidden_states.shape[1]
    for i in range(q_len):
        longest = max(call.past) + i + 1
        one = dataclasses.replace(
            call,
            hidden_states=call.hidden_states[:, i : i + 1],
            keys=keys,
            values=values,
            past=[past + i for past in call.past],
            rotary=[(cos[:, i : i + 1], sin[:, i : i + 1]) for cos, sin in call.rotary],
            mask=None if call.mask is None else call.mask[:, :, i : i + 1, :longest],
            per_layer_inputs=[inputs[:, i : i + 1] for inputs in call.per_layer_inputs],
        )
        output, keys, values = one.run()
        outputs.append(output)
    return torch.cat(outputs, dim=1), keys, values


def assert_same_steps(case: Case, start: Tensor | None = None) -> None:
    call = dataclasses.replace(call_of(case), start=start)
    together, alone = call.run(), step_by_step(call)
    assert torch.equal(together[0], alone[0])
    for ours, theirs in zip((*together[1], *together[2]), (*alone[1], *alone[2]), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("q_len", [2, 7, FEW])
@pytest.mark.parametrize("past", [0, 5, 250, 301])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_of_decoders(case, past, q_len):
    """The keys are cut behind 256, within the new tokens or before."""
    torch.manual_seed(past)
    assert_same_steps(dataclasses.replace(case, batch=1, past=past, q_len=q_len))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("start", [(0, 0), (0, 77), (299, 3)])
@pytest.mark.parametrize("window", [None, 40])
def test_sequences_with_padding_are_those_alone(start, window):
    """Each of the batch, and each token of it."""
    torch.manual_seed(1)
    case = Case(batch=2, past=600, q_len=5, window=window, cache=torch.bfloat16)
    call = call_of(case)
    call = dataclasses.replace(
        call, start=torch.tensor(start, dtype=torch.int32), rotary=[(c[:1], s[:1]) for c, s in call.rotary]
    )
    together = call.run()[0]
    assert torch.equal(together, step_by_step(call)[0])
    for row, first in enumerate(start):
        alone = dataclasses.replace(
            call,
            hidden_states=call.hidden_states[row : row + 1],
            keys=[keys[row : row + 1, :, first:] for keys in call.keys],
            values=[values[row : row + 1, :, first:] for values in call.values],
            past=[past - first for past in call.past],
            start=None,
        )
        assert torch.equal(alone.run()[0], together[row : row + 1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("q_len", [2, 7, FEW])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8])
def test_tokens_of_windows_whose_past_was_dropped(cache, q_len):
    """One layer of two has dropped a whole part of its keys."""
    torch.manual_seed(q_len)
    assert_same_steps(Case(batch=1, window=40, forget=True, past=256 + 43, q_len=q_len, cache=cache))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_tokens_after_a_long_text(case):
    torch.manual_seed(2)
    assert_same_steps(dataclasses.replace(case, batch=1, past=1537, q_len=9))
