"""Beam search of this package returns the tokens, the scores and the cache of transformers' loop."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.generate.cache import CPUCache
from tests.generate.decoders import DECODERS, ENCODER_DECODERS, assert_same, both, build, eager, prompt


@pytest.mark.parametrize("name", DECODERS)
def test_beams(name, loops):
    assert_same(name, prompt(7, batch=2, padded=True), num_beams=4, max_new_tokens=24)
    assert loops == [1 if name in ENCODER_DECODERS else 7]


@pytest.mark.parametrize("beams", [2, 3, 8, 32])
def test_few_and_many_beams(beams):
    for name in ("llama", "bart"):
        assert_same(name, prompt(7), num_beams=beams, max_new_tokens=16, num_return_sequences=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"length_penalty": 2.0, "early_stopping": True},
        {"length_penalty": -1.0, "early_stopping": "never"},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "num_return_sequences": 4},
        {"length_penalty": 0.0, "early_stopping": "never", "num_return_sequences": 2},
        {"min_new_tokens": 5, "forced_eos_token_id": 1, "eos_token_id": [1, 7, 9]},
        {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3},
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_kinds_of_beam_search(name, settings):
    assert_same(name, prompt(6, batch=2), seed=3, num_beams=4, max_new_tokens=20, **settings)


def test_beams_return_scores_and_our_cache():
    asked = {"return_dict_in_generate": True, "output_scores": True}
    expected, output = both("llama", prompt(6, batch=2), num_beams=3, max_new_tokens=10, **asked)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.beam_indices, expected.beam_indices)
    torch.testing.assert_close(output.sequences_scores, expected.sequences_scores)
    assert type(output.past_key_values) is CPUCache
    for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_recorded_scores_logits_and_beams(name):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, output = both(
        name, prompt(6, batch=2), num_beams=3, max_new_tokens=10, do_sample=False, **asked
    )
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.beam_indices, expected.beam_indices)
    for part in ("scores", "logits"):
        for ours, theirs in zip(getattr(output, part), getattr(expected, part), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Loudest(LogitsProcessor):
    """Leaves one token to each beam, another one to each, and the rest at minus infinity: ties among what cannot be chosen."""

    def __call__(self, input_ids, scores):
        kept = torch.full_like(scores, -torch.inf)
        token = (input_ids[:, -1:] * 7 + 3) % scores.shape[-1]
        return kept.scatter(1, token, scores.gather(1, token))


class AfterEleven(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(dim=1) % 11 == 0


def test_processors_and_criteria_of_the_user():
    for name in ("llama", "t5"):
        assert_same(
            name,
            prompt(6, batch=2),
            num_beams=3,
            max_new_tokens=12,
            logits_processor=LogitsProcessorList([Loudest()]),
        )
        assert_same(
            name,
            prompt(6, batch=2, seed=3),  # whose beams are 3e-3 apart and more
            num_beams=4,
            max_new_tokens=30,
            num_return_sequences=4,
            stopping_criteria=StoppingCriteriaList([AfterEleven()]),
        )


def test_a_model_with_its_own_part_of_the_search_keeps_it(loops):
    model = build("llama")
    own = type("OwnBeams", (type(model),), {"_reorder_cache": staticmethod(lambda cache, index: cache)})
    model.__class__ = own
    accelerate_for_cpu(model, dtype="float32")
    model.generate(**prompt(5), num_beams=2, max_new_tokens=3)
    assert loops == []
    left = {item.structure: item.reason for item in explain(model).left}
    assert "overrides _reorder_cache" in left["beam search"]


def test_streamers_are_refused_as_by_transformers():
    with pytest.raises(ValueError, match="streamer"):
        both("llama", prompt(5), num_beams=2, max_new_tokens=3, streamer=object())


def test_the_model_is_asked_once_per_step(monkeypatch):
    model = accelerate_for_cpu(build("llama"), dtype="float32")
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    tokens = model.generate(**prompt(5), num_beams=3, max_new_tokens=6, min_new_tokens=6)
    assert len(calls) == 6
    assert (
        tokens.tolist()
        == eager("llama").generate(**prompt(5), num_beams=3, max_new_tokens=6, min_new_tokens=6).tolist()
    )
