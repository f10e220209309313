"""Decoding by transformers' own loops returns the same, and runs on this package's cache; and what it returns with drafts."""

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.generate.cache import CPUCache
from tests.generate.decoders import (
    DECODERS,
    ENCODER_DECODERS,
    PAD,
    accelerated,
    assert_same,
    both,
    build,
    eager,
    prompt,
)


def self_attention(cache):
    return getattr(cache, "self_attention_cache", cache)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3", "t5"])
@pytest.mark.parametrize("draft", ["itself", "another", "another, accelerated"])
def test_assisted_generation(name, draft, loops):
    inputs, results = prompt(9), []
    for model in (eager(name), accelerated(name)):
        assistant = model if draft == "itself" else build(name, seed=1)
        if draft == "another, accelerated":
            accelerate_for_cpu(assistant, dtype="float32")
        results.append(
            model.generate(**inputs, assistant_model=assistant, do_sample=False, max_new_tokens=40)
        )
    assert results[0].tolist() == results[1].tolist()
    assert bool(loops) is (name != "t5")


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bart"])
def test_prompt_lookup(name, loops):
    inputs = prompt(6)
    inputs = {key: value.repeat(1, 4) for key, value in inputs.items()}
    assert_same(name, inputs, do_sample=False, max_new_tokens=40, prompt_lookup_num_tokens=5)
    assert bool(loops) is (name not in ENCODER_DECODERS)


def test_a_static_cache_begins_with_one_token():
    """Its mask has columns for all places, and two dimensions where there is one query."""
    settings = {"do_sample": False, "max_new_tokens": 10, "cache_implementation": "static"}
    assert_same("llama", prompt(1), disable_compile=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]])},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_loop_does_not_cover(settings, loops):
    expected, output = both("llama", prompt(6), do_sample=False, max_new_tokens=10, **settings)
    if "return_dict_in_generate" in settings:
        assert len(output.hidden_states) == len(expected.hidden_states) == 10
        assert type(output.past_key_values) is CPUCache
        expected, output = expected.sequences, output.sequences
    assert output.tolist() == expected.tolist()
    assert loops == []


def test_hidden_states_of_all_steps_are_those_of_eager():
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    expected, output = both("gpt2", prompt(6), do_sample=False, max_new_tokens=6, **asked)
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        for layer, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(layer, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_our_cache_is_where_transformers_would_make_its_own(name):
    for settings in ({"do_sample": False}, {"num_beams": 2}, {"do_sample": True}):
        output = accelerated(name).generate(
            **prompt(5), **settings, max_new_tokens=4, return_dict_in_generate=True, pad_token_id=PAD
        )
        assert type(self_attention(output.past_key_values)) is CPUCache
        if name in ENCODER_DECODERS:
            assert isinstance(output.past_key_values.cross_attention_cache, CPUCache)
