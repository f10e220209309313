"""Stop strings end a text in the loop of this package as in that of transformers."""

import pytest
import torch
from transformers import GenerationConfig

from tests.acceptance.writer import make_tokenizer
from tests.generate.decoders import PAD, accelerated, eager, prompt

SETTINGS = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": PAD, "eos_token_id": None}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def stops(tokenizer, inputs):
    """Return parts of the texts that eager writes."""
    written = eager("llama").generate(**inputs, **SETTINGS)[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(ids[5:7]) for ids in written]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("place", ["keyword", "config"])
@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "drafts"])
def test_texts_end_where_those_of_transformers_end(batch, place, drafts, tokenizer, loops):
    inputs = prompt(9, batch=batch)
    found = stops(tokenizer, inputs)
    given = {"stop_strings": found} if place == "keyword" else {}
    results = []
    for model in (eager("llama"), accelerated("llama")):
        if place == "config":
            given = {"generation_config": GenerationConfig(**SETTINGS, stop_strings=found)}
        else:
            given = {**SETTINGS, "stop_strings": found}
        more = drafts if batch == 1 else {}
        results.append(model.generate(**inputs, **given, **more, tokenizer=tokenizer).tolist())
        if place == "config":
            assert given["generation_config"].stop_strings == found
    assert results[0] == results[1]
    assert batch > 1 or len(results[1][0]) < 9 + 40
    assert loops == [9]


def test_a_tokenizer_alone_changes_nothing(tokenizer, loops):
    model, inputs = accelerated("llama"), prompt(9)
    expected = model.generate(**inputs, **SETTINGS)
    assert torch.equal(model.generate(**inputs, **SETTINGS, tokenizer=tokenizer), expected)
    assert loops == [9, 9]


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        accelerated("llama").generate(**prompt(9), **SETTINGS, stop_strings=["a"])


def test_stop_strings_of_the_model_count(tokenizer, loops):
    inputs, results = prompt(9), []
    found = stops(tokenizer, inputs)[0]
    for model in (eager("llama"), accelerated("llama")):
        model.generation_config.stop_strings = found
        try:
            results.append(model.generate(**inputs, **SETTINGS, tokenizer=tokenizer).tolist())
        finally:
            model.generation_config.stop_strings = None
    assert results[0] == results[1]
    assert loops == []
