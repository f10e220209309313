"""The decode loop returns the tokens of transformers' loop, for the same random numbers."""

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GenerationConfig, LogitsProcessor, StoppingCriteria

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.generate.cache import CPUCache
from tests.generate.decoders import (
    DECODER_ONLY,
    DECODERS,
    ENCODER_DECODERS,
    END,
    PAD,
    VOCABULARY,
    accelerated,
    assert_same,
    both,
    prompt,
)

GREEDY = {"do_sample": False}
SAMPLING = {
    "plain": {"do_sample": True, "top_k": 0},
    "warm": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "all processors": {
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [8, 9]],
        "suppress_tokens": [11, 12],
        "begin_suppress_tokens": [13],
        "sequence_bias": {(14,): -5.0},
        "min_new_tokens": 5,
        "exponential_decay_length_penalty": (10, 1.1),
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
}


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_those_of_eager(name, loops):
    # Random weights without positions repeat themselves.
    settings = {"no_repeat_ngram_size": 2} if name in ENCODER_DECODERS else {}
    tokens = assert_same(name, prompt(60), **GREEDY, **settings, max_new_tokens=80, eos_token_id=None)
    assert tokens.shape[1] == 80 + (1 if name in ENCODER_DECODERS else 60)
    assert len(tokens.unique()) > 5
    assert len(loops) == 1


@pytest.mark.parametrize("name", DECODERS)
def test_left_padded_batches(name, loops):
    assert_same(name, prompt(9, batch=3, padded=True), **GREEDY, max_new_tokens=24)
    assert len(loops) == 1


@pytest.mark.parametrize("settings", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
def test_samples_are_those_of_eager_for_the_same_seed(name, settings, loops):
    for seed in range(3):
        assert_same(name, prompt(6, batch=2, seed=seed), seed, **settings, max_new_tokens=20)
    assert len(loops) == 3


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_several_samples_per_prompt(name, loops):
    tokens = assert_same(name, prompt(6, batch=2), do_sample=True, num_return_sequences=3, max_new_tokens=12)
    assert len(tokens) == 6
    assert len(loops) == 1


def test_each_sequence_ends_at_its_own_end_token(loops):
    free = accelerated("llama").generate(**prompt(5, batch=4), **GREEDY, max_new_tokens=30, eos_token_id=None)
    ends = [int(free[0, 9]), int(free[1, 20])]
    tokens = assert_same(
        "llama", prompt(5, batch=4), **GREEDY, max_new_tokens=30, eos_token_id=ends, pad_token_id=PAD
    )
    assert tokens[0, 10:].unique().tolist() == [PAD]
    # Without a padding token, the first end token is one.
    tokens = assert_same(
        "llama", prompt(5, batch=4), **GREEDY, max_new_tokens=30, eos_token_id=ends, pad_token_id=None
    )
    assert tokens[0, 10:].unique().tolist() == [ends[0]]
    assert len(loops) == 3


@pytest.mark.parametrize("name", DECODERS)
def test_scores_and_logits(name, loops):
    settings = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected, output = both(
        name, prompt(5, batch=2), **GREEDY, max_new_tokens=10, repetition_penalty=1.3, **settings
    )
    assert type(output) is type(expected)
    assert output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    for kind in ("scores", "logits"):
        assert len(output[kind]) == len(expected[kind])
        for ours, theirs in zip(output[kind], expected[kind], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(output.scores[-1], output.logits[-1])
    cache = output.past_key_values
    cache = cache.self_attention_cache if name in ENCODER_DECODERS else cache
    assert type(cache) is CPUCache
    assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
    assert len(loops) == 1


class ForbidTheLast(LogitsProcessor):
    """Changes scores in place, and keeps its arguments."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids)
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        return scores


class StopAtLength(StoppingCriteria):
    def __init__(self, lengths):
        self.lengths, self.seen = torch.tensor(lengths), []

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.view(-1).numel() == input_ids.numel()  # contiguous, as ever
        self.seen.append(input_ids)
        return input_ids.shape[1] >= self.lengths


def test_processors_and_criteria_of_the_user(loops):
    processors, criteria = ForbidTheLast(), StopAtLength([9, 14])
    inputs = prompt(5, batch=2)
    settings = {**GREEDY, "max_new_tokens": 30}
    tokens = assert_same(
        "llama", inputs, **settings, logits_processor=[processors], stopping_criteria=[criteria]
    )
    assert tokens.shape[1] == 14
    assert (tokens[:, 5:] != tokens[:, 4:-1])[0, :4].all()
    for seen in (processors.seen, criteria.seen):  # what they keep stays what it was
        half = len(seen) // 2
        assert [ids.tolist() for ids in seen[:half]] == [ids.tolist() for ids in seen[half:]]
    assert len(loops) == 1


def test_prefixes_that_are_allowed(loops):
    tokens = assert_same(
        "gpt2",
        prompt(4),
        **GREEDY,
        max_new_tokens=10,
        prefix_allowed_tokens_fn=lambda batch, ids: [20, 21, 22 + len(ids) % 3],
    )
    assert tokens[0, 4:].min() >= 20
    assert len(loops) == 1


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompts_in_chunks(name, chunk, loops):
    for padded in (False, True):
        assert_same(
            name, prompt(18, batch=2, padded=padded), **GREEDY, max_new_tokens=10, prefill_chunk_size=chunk
        )
    assert len(loops) == 2


@pytest.mark.parametrize("name", DECODER_ONLY)
def test_embeddings_instead_of_tokens(name, loops):
    results = []
    from tests.generate.decoders import eager

    for model in (eager(name), accelerated(name)):
        inputs = prompt(6, batch=2)
        embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
        results.append(
            model.generate(
                inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **GREEDY, max_new_tokens=12
            )
        )
    assert results[0].tolist() == results[1].tolist()
    assert len(loops) == 1


def test_settings_in_a_generation_config(loops):
    config = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=7, eos_token_id=END, pad_token_id=PAD)
    assert_same("llama", prompt(5), generation_config=config)
    assert len(loops) == 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_decoder_prompt(name, loops):
    inputs = prompt(8, batch=2, padded=True)
    start = torch.tensor([[PAD, 5, 9], [PAD, 7, 6]])
    for extra in ({}, {"decoder_attention_mask": torch.ones_like(start)}):
        assert_same(name, inputs, **GREEDY, max_new_tokens=15, decoder_input_ids=start, **extra)
    assert len(loops) == 2


def test_an_encoder_that_was_run_before(loops):
    from tests.generate.decoders import eager

    inputs, results = prompt(8, batch=2), []
    for model in (eager("t5"), accelerated("t5")):
        with torch.no_grad():
            outputs = model.get_encoder()(**inputs)
        results.append(
            model.generate(
                encoder_outputs=outputs, attention_mask=inputs["attention_mask"], **GREEDY, max_new_tokens=12
            )
        )
    assert results[0].tolist() == results[1].tolist()
    assert len(loops) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_low_precision_generates_as_its_own_stock_loop(dtype):
    """The loop changes no number: the same accelerated model gives the same tokens through transformers' loop."""
    model = accelerated("llama", dtype, kv_cache="float32")  # as in the cache that the stock loop makes
    inputs = prompt(9, batch=2, padded=True)
    ours = model.generate(**inputs, **GREEDY, max_new_tokens=32)
    theirs = type(model).generate(model, **inputs, **GREEDY, max_new_tokens=32)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_model_that_hands_no_cache_back(padded, loops):
    """An encoder that is made to generate: its layers write to the cache that they are given, and its outputs have none."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    given = {**prompt(9, batch=3, padded=padded), **GREEDY, "max_new_tokens": 20, "pad_token_id": PAD}
    expected = model.generate(**given)
    assert torch.equal(accelerate_for_cpu(model, dtype="float32").generate(**given), expected)
    assert len(loops) == 1
