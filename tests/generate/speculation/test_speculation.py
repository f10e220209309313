"""Text with drafts is, bit for bit, the text without."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.speculation import steps
from hf_cpu_accel.generate.speculation.draft import DraftLength, Speculation
from hf_cpu_accel.generate.speculation.request import SpeculationRequest
from tests.generate.decoders import DECODER_ONLY, END, PAD, accelerated, build, prompt

DTYPES = ("float32", "bfloat16", "int8", "int4")
SETTINGS = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": PAD, "eos_token_id": None}
LOOKUP = {"prompt_lookup_num_tokens": 7}


def repeated(length=9, times=4, seed=0):
    return {key: value.repeat(1, times) for key, value in prompt(length, seed=seed).items()}


@pytest.fixture
def drafts(monkeypatch):
    """Draft only if asked to, but then as much as fits, whatever it costs; return a list of (drafted, accepted) per call."""

    def longest(self, confidence, room):
        return max((size for size in self.sizes if confidence and size <= room), default=0)

    counted, add = [], Speculation.add

    def adding(self, drafted, accepted):
        counted.append((drafted, accepted))
        add(self, drafted, accepted)

    monkeypatch.setattr(SpeculationRequest, "by_default", lambda _: None)
    monkeypatch.setattr(DraftLength, "choose", longest)
    monkeypatch.setattr(Speculation, "add", adding)
    return counted


def plain_and_drafted(model, inputs, plain=(), drafted=LOOKUP, seed=0, **settings):
    results = []
    for more in (dict(plain), drafted):
        torch.manual_seed(seed)
        copies = {key: value.clone() for key, value in inputs.items()}
        results.append(model.generate(**copies, **{**SETTINGS, **settings, **more}))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DECODER_ONLY)
def test_all_bits_of_all_logits_are_equal(name, dtype, drafts):
    asked = {"return_dict_in_generate": True, "output_logits": True}
    model = accelerated(name, dtype)
    expected, output = plain_and_drafted(model, repeated(), **asked)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert all(map(torch.equal, output.logits, expected.logits))
    assert len(output.logits) == len(expected.logits)
    assert len(drafts) > 3
    ours, theirs = output.past_key_values, expected.past_key_values
    assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("draft", ["itself", "another", "another, accelerated"])
def test_draft_models(name, draft, drafts):
    model = accelerated(name)
    assistant = model if draft == "itself" else build(name, seed=1)
    if draft == "another, accelerated":
        accelerate_for_cpu(assistant, dtype="float32")
    expected, output = plain_and_drafted(model, prompt(9), drafted={"assistant_model": assistant})
    assert output.tolist() == expected.tolist()
    assert drafts
    if draft == "itself":
        assert all(accepted == drafted for drafted, accepted in drafts[:-1])


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("seed", range(3))
def test_seeds_give_the_same_tokens(drafter, seed, drafts):
    drafted = LOOKUP if drafter == "lookup" else {"assistant_model": accelerated("llama")}
    expected, output = plain_and_drafted(
        accelerated("llama"), repeated(), drafted=drafted, seed=seed, do_sample=True, temperature=0.5
    )
    assert output.tolist() == expected.tolist()
    assert drafts
    assert drafter == "lookup" or sum(accepted for _, accepted in drafts) > 0


class Forbids(LogitsProcessor):
    """A processor that depends on the whole text."""

    def __init__(self):
        self.texts = []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = -torch.inf
        scores[:, (input_ids.sum() % 250).item()] += 3
        return scores


def test_processors_see_what_they_see_without_drafts(drafts):
    seen = []
    expected, output = plain_and_drafted(
        accelerated("llama"),
        repeated(),
        plain={"logits_processor": LogitsProcessorList([seen.append(Forbids()) or seen[-1]])},
        drafted={**LOOKUP, "logits_processor": LogitsProcessorList([seen.append(Forbids()) or seen[-1]])},
        repetition_penalty=1.3,
        no_repeat_ngram_size=3,
    )
    assert output.tolist() == expected.tolist()
    assert seen[0].texts == seen[1].texts
    assert drafts


class Collects(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_streamers_get_token_by_token(drafts):
    streamer = Collects()
    output = accelerated("llama").generate(**repeated(), **SETTINGS, **LOOKUP, streamer=streamer)
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended


class StopsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("length", range(37, 50))
def test_a_text_may_end_within_a_draft(length, drafts):
    """And the next call goes on from its cache."""
    model, results = accelerated("mistral", "bfloat16"), []
    inputs = repeated()
    for more in ({}, LOOKUP):
        cache = DynamicCache(config=model.config)
        first = model.generate(
            **inputs, **SETTINGS, **more, past_key_values=cache, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([StopsAt(length)])
        )  # fmt: skip
        assert first.sequences.shape[1] == length
        assert first.past_key_values.get_seq_length() == length - 1
        ids = torch.cat([first.sequences, prompt(5, seed=3)["input_ids"]], dim=1)
        second = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=first.past_key_values,
            **SETTINGS,
            **more,
        )
        results.append((first.sequences.tolist(), second.tolist()))
    assert results[0] == results[1]


def test_end_tokens_and_longest_texts_end_it(drafts):
    model, inputs = accelerated("llama"), repeated()
    text = model.generate(**inputs, **SETTINGS)[0].tolist()
    for end in set(text[36:60]):
        expected, output = plain_and_drafted(model, inputs, eos_token_id=[END, end])
        assert output.tolist() == expected.tolist()
    for tokens in (1, 2, 3, 8, 9):
        expected, output = plain_and_drafted(model, inputs, max_new_tokens=tokens)
        assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_texts(dtype, drafts):
    """Several parts of the keys, several storages, and most of a window away."""
    for name in ("llama", "mistral"):
        model = accelerated(name, dtype)
        expected, output = plain_and_drafted(model, repeated(60, 4), max_new_tokens=250)
        assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("kv_cache", ["float32", "bfloat16", "int8"])
def test_storage_dtypes(kv_cache, drafts):
    model = accelerated("gemma2", "bfloat16", kv_cache)
    expected, output = plain_and_drafted(model, repeated(), max_new_tokens=60)
    assert output.tolist() == expected.tolist()


def test_padding_and_positions_count(drafts):
    inputs = repeated()
    inputs["input_ids"][0, :5], inputs["attention_mask"][0, :5] = PAD, 0
    for name in ("llama", "opt", "bloom"):
        expected, output = plain_and_drafted(accelerated(name), inputs)
        assert output.tolist() == expected.tolist()


def test_embeddings_as_prompt(drafts):
    model = accelerated("llama")
    embeds = model.get_input_embeddings()(repeated()["input_ids"]).detach()
    expected, output = plain_and_drafted(model, {"inputs_embeds": embeds})
    assert output.tolist() == expected.tolist()


def test_an_error_leaves_the_cache_with_the_text(drafts):
    class Raises(Collects):
        def put(self, value):
            super().put(value)
            if len(self.tokens) == 50:
                raise KeyboardInterrupt

    model = accelerated("llama")
    cache = CPUCache(model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**repeated(), **SETTINGS, **LOOKUP, streamer=Raises(), past_key_values=cache)
    assert cache.get_seq_length() == 49


def test_a_rejected_draft_costs_a_draw_of_the_same_distribution(drafts):
    """Chi-square of 700 continuations with and without drafts, whose seeds differ."""
    model = build("llama", seed=2)
    inputs = {
        "input_ids": torch.tensor([[4, 5, 6, 4, 5]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
    }
    accelerate_for_cpu(model, dtype="float32")
    settings = {**SETTINGS, "do_sample": True, "top_k": 8, "temperature": 3.0, "max_new_tokens": 3}
    counts = []
    for more, seed in (({}, 0), (LOOKUP, 1)):
        torch.manual_seed(seed)
        tokens = [model.generate(**inputs, **settings, **more)[0, 6:].tolist() for _ in range(700)]
        counts.append([tuple(pair) for pair in tokens])
    assert sum(accepted < drafted for drafted, accepted in drafts) > 50
    assert chi_square_is_plausible(*[[pair[0] for pair in pairs] for pairs in counts])
    assert chi_square_is_plausible(*[[pair[1] for pair in pairs] for pairs in counts])


def chi_square_is_plausible(one, other):
    """Return whether two samples of the same size may have one distribution, at a level of 0.001."""
    from scipy.stats import chi2_contingency

    tokens = sorted(token for token in {*one, *other} if one.count(token) + other.count(token) >= 10)
    table = [[sample.count(token) for token in tokens] for sample in (one, other)]
    return len(tokens) < 2 or chi2_contingency(table).pvalue > 0.001


def test_what_transformers_refuses_is_refused():
    with pytest.raises(ValueError, match="batch"):
        accelerated("llama").generate(**prompt(6, batch=2), **SETTINGS, **LOOKUP)


def test_the_plan_says_what_was_accepted(drafts):
    model = accelerate_for_cpu(build("llama"), dtype="float32")
    assert "speculative decoding" in {item.structure for item in explain(model).replaced}
    assert not any("drafted" in note for note in explain(model).notes)
    model.generate(**repeated(), **SETTINGS, **LOOKUP)
    drafted, accepted = (sum(column) for column in zip(*drafts, strict=True))
    note = f"speculative decoding: {accepted} of {drafted} drafted tokens accepted in {len(drafts)} calls"
    assert note in explain(model).notes


def test_drafts_without_being_asked_for(monkeypatch):
    """They begin once the steps are known to be exact, and never with speculate="off"."""
    used = []
    draft = steps.SpeculativeSteps._draft
    monkeypatch.setattr(
        steps.SpeculativeSteps, "_draft", lambda self: used.append(drafted := draft(self)) or drafted
    )
    for speculate in ("auto", "off"):
        model = accelerate_for_cpu(build("llama"), dtype="bfloat16", speculate=speculate)
        model.generate(**repeated(), **{**SETTINGS, "max_new_tokens": 120})
        assert bool(used) is (speculate == "auto")
        used.clear()
