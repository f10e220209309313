"""The tokens of an engine against those that `generate` gives for each prompt alone."""

import time

import pytest
import torch
import transformers

from hf_cpu_accel.serve.engine import Engine
from hf_cpu_accel.serve.engine.forward import Forward
from tests.generate.decoders import DECODER_ONLY, END, accelerated, eager
from tests.generate.replaying import count_replayed
from tests.serve.engine.cases import alone, text, texts
from tests.serve.engine.test_engine import wait_until

LENGTHS = (1, 9, 17, 3, 24, 12, 2, 8, 30)


@pytest.mark.parametrize("name", DECODER_ONLY)
def test_ragged_prompts_join_and_leave(name):
    """Fewer rows than requests, and chunks shorter than prompts: sequences join and leave in the middle."""
    model = accelerated(name)
    asked = list(zip(texts(9, 50), LENGTHS, strict=True))
    with Engine(model, rows=3, prefill_chunk=16, max_length=100) as engine:
        answers = [engine.submit(ids, max_new_tokens=tokens, eos_token_id=END) for ids, tokens in asked]
        for (ids, tokens), answer in zip(asked, answers, strict=True):
            assert list(answer) == alone(model, ids, tokens)


def test_a_model_that_is_not_accelerated():
    model = eager("llama")
    asked = list(zip(texts(9, 50), LENGTHS, strict=True))
    with Engine(model, rows=3, prefill_chunk=16) as engine:
        answers = [engine.submit(ids, max_new_tokens=tokens, eos_token_id=END) for ids, tokens in asked]
        for (ids, tokens), answer in zip(asked, answers, strict=True):
            assert answer.result() == alone(model, ids, tokens)


def test_more_rows_than_the_smallest_products_have():
    model, asked = accelerated("qwen3"), texts(14, 30)
    with Engine(model, rows=12) as engine:
        answers = [engine.submit(ids, max_new_tokens=10, eos_token_id=END) for ids in asked]
        assert [answer.result() for answer in answers] == [alone(model, ids, 10) for ids in asked]


@pytest.mark.parametrize(("dtype", "kv_cache"), [("bfloat16", "auto"), ("float32", "int8"), ("int8", "auto")])
def test_other_dtypes_get_the_tokens_of_the_engine_alone(dtype, kv_cache):
    """Few rows and many are rounded alike in these sizes, so neighbors change nothing."""
    model = accelerated("llama", dtype, kv_cache)
    asked = list(zip(texts(9, 50), LENGTHS, strict=True))
    with Engine(model, rows=1) as engine:
        expected = [engine.submit(ids, max_new_tokens=tokens).result() for ids, tokens in asked]
    with Engine(model, rows=4) as engine:
        answers = [engine.submit(ids, max_new_tokens=tokens) for ids, tokens in asked]
        assert [answer.result() for answer in answers] == expected


def test_an_end_token_is_the_last_one():
    model, ids = accelerated("llama"), text(9)
    tokens = alone(model, ids, 20, eos_token_id=None)
    end = tokens[7]
    with Engine(model) as engine:
        stopped = engine.submit(ids, max_new_tokens=20, eos_token_id=[end, 5000])
        whole = engine.submit(ids, max_new_tokens=20)
        assert stopped.result() == tokens[: tokens.index(end) + 1]
        assert stopped.finish_reason == "stop"
        assert whole.result() == tokens
        assert whole.finish_reason == "length"


def test_sampling_equals_generate():
    model = accelerated("llama")
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 20, "repetition_penalty": 1.4}
    asked = texts(5, 40)
    with Engine(model, rows=3, prefill_chunk=16) as engine:
        answers = []
        for seed, ids in enumerate(asked):
            processors = model._get_logits_processor(
                transformers.GenerationConfig(**settings), input_ids_seq_length=len(ids)
            )
            answers.append(
                engine.submit(ids, max_new_tokens=12, logits_processor=processors, do_sample=True, seed=seed)
            )
        for seed, (ids, answer) in enumerate(zip(asked, answers, strict=True)):
            torch.manual_seed(seed)
            assert answer.result() == alone(model, ids, 12, eos_token_id=None, **settings)


def test_processors_affect_only_their_request():
    model, ids = accelerated("llama"), text(9)
    tokens = alone(model, ids, 10)
    forbidden = transformers.LogitsProcessorList(
        [transformers.SuppressTokensLogitsProcessor([tokens[0]], device="cpu")]
    )
    with Engine(model) as engine:
        plain = engine.submit(ids, max_new_tokens=10, eos_token_id=END)
        other = engine.submit(ids, max_new_tokens=10, eos_token_id=END, logits_processor=forbidden)
        assert plain.result() == tokens
        assert other.result() == alone(model, ids, 10, suppress_tokens=[tokens[0]])


def test_long_prompts_do_not_block_other_requests(monkeypatch):
    call, sizes = Forward.__call__, []

    def counted(self, ids, *others):
        sizes.append(ids.shape[1])
        return call(self, ids, *others)

    model = accelerated("llama")
    monkeypatch.setattr(model.generate, "speculates", False)
    with Engine(model, prefill_chunk=16, prefix_cache_bytes=0) as engine:
        monkeypatch.setattr(Forward, "__call__", counted)
        short = engine.submit(text(5), max_new_tokens=300)
        next(iter(short))
        engine.submit(text(200, seed=1), max_new_tokens=1).result()
        short.cancel()
    first, last = sizes.index(16), sizes.index(8)
    assert sizes[first : last + 1] == [16, 1] * 12 + [8]  # after each chunk, a step


def test_tokens_come_one_by_one():
    model = accelerated("llama")
    with Engine(model) as engine:
        seen = 0
        generation = engine.submit(text(5), max_new_tokens=300)
        for _ in generation:
            seen += not generation.done
            time.sleep(0)
        assert seen > 10


def test_steps_between_changes_of_the_rows_are_replayed(monkeypatch):
    model, asked = accelerated("llama"), [(text(9), 60), (text(30, seed=1), 90)]
    expected = [alone(model, ids, tokens, eos_token_id=None) for ids, tokens in asked]
    replayed = count_replayed(monkeypatch)
    monkeypatch.setattr(model.generate, "speculates", False)
    with Engine(model, rows=2) as engine:
        answers = [engine.submit(ids, max_new_tokens=tokens) for ids, tokens in asked]
        assert [answer.result() for answer in answers] == expected
    assert replayed.count(True) >= 60
    assert replayed.count(False) <= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_sequence_that_is_alone_gets_drafts(dtype, monkeypatch):
    """Others come and leave meanwhile; the tokens stay those of plain steps."""
    model = accelerated("llama", dtype)
    asked = [(text(9) * 4, 200), (text(9) * 4, 30), (text(20, seed=2), 90)]
    monkeypatch.setattr(model.generate, "speculates", False)
    expected = [alone(model, ids, tokens, eos_token_id=None) for ids, tokens in asked]
    monkeypatch.setattr(model.generate, "speculates", True)
    with Engine(model, rows=3) as engine:
        first = engine.submit(asked[0][0], max_new_tokens=200)
        wait_until(lambda: engine.metrics.speculation.accepted > 5)
        others = [engine.submit(ids, max_new_tokens=tokens) for ids, tokens in asked[1:]]
        assert [answer.result() for answer in (first, *others)] == expected
        drafts = engine.metrics.speculation
        assert 0 < drafts.accepted <= drafts.drafted
