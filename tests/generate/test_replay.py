"""Replayed steps agree with the model's own code bit by bit."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList

from hf_cpu_accel import accelerate_for_cpu
from tests.generate.decoders import DECODERS, accelerated, build, eager, prompt
from tests.generate.replaying import Once, assert_equal, generate


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_scores_are_those_of_the_model(name, padded, replayed):
    assert_equal(accelerated(name), prompt(9, batch=3, padded=padded))
    assert len(replayed) >= 10
    assert all(replayed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_beams_that_change_places(name, replayed):
    settings = {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 2}
    assert_equal(accelerated(name), prompt(9, batch=2), **settings)
    assert replayed.count(True) >= 20
    assert replayed.count(False) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_of_narrow_weights_and_caches(dtype, kv_cache, replayed):
    assert_equal(accelerated("llama", dtype, kv_cache), prompt(9), max_new_tokens=120)  # storages grow
    assert len(replayed) >= 100
    assert all(replayed)


def test_windows_that_move_on(replayed):
    assert_equal(accelerated("gemma2"), prompt(30), max_new_tokens=150)
    assert len(replayed) > 30


def test_a_conversation_goes_on(replayed):
    model = accelerated("qwen3")
    first = generate(model, prompt(9), replay=True)
    again = {"input_ids": torch.cat([first.sequences, prompt(5)["input_ids"]], dim=1)}
    expected = generate(model, again, replay=False, past_key_values=copy.deepcopy(first.past_key_values))
    output = generate(model, again, replay=True, past_key_values=first.past_key_values)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    assert len(replayed) > 50


def test_the_cache_can_be_continued_by_eager():
    output = generate(accelerated("llama"), prompt(9), replay=True)
    last = output.sequences[:, -1:]
    with torch.no_grad():
        logits = eager("llama")(last, past_key_values=output.past_key_values).logits
        expected = eager("llama")(output.sequences).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_hooks_that_come_meanwhile_are_called(replayed):
    model, called, handles = accelerated("llama"), [], []

    def register():
        hook = model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
        handles.append(hook)

    generate(model, prompt(9), replay=True, logits_processor=LogitsProcessorList([Once(30, register)]))
    handles[0].remove()
    assert len(replayed) in range(5, 20)
    assert len(called) == 9 + 40 - 31


def test_no_steps_of_a_watched_model_are_replayed(replayed):
    model, called = accelerated("llama"), []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: called.append(1))
    generate(model, prompt(9), replay=True)
    handle.remove()
    assert not replayed
    assert len(called) == 40


def test_weights_that_are_written_to_meanwhile_count(replayed):
    outputs = []
    for replay in (False, True):
        model = accelerate_for_cpu(build("llama"))
        norm = model.model.layers[0].input_layernorm.weight

        def write(norm=norm):
            norm.data.mul_(-1.5)

        processors = LogitsProcessorList([Once(30, write)])
        outputs.append(generate(model, prompt(9), replay=replay, logits_processor=processors))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert replayed.count(False) == 1
    assert replayed[-1]


def test_a_cache_that_is_taken_back_meanwhile_counts(replayed):
    outputs = []
    for replay in (False, True):
        model = accelerated("llama")
        cache = generate(model, prompt(9), replay=False, max_new_tokens=1, min_new_tokens=1).past_key_values
        processors = LogitsProcessorList([Once(30, lambda cache=cache: cache.crop(-3))])
        given = {"input_ids": torch.cat([prompt(9)["input_ids"], prompt(3)["input_ids"]], dim=1)}
        outputs.append(
            generate(model, given, replay=replay, past_key_values=cache, logits_processor=processors)
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert replayed.count(False) == 1
