"""Text generation as users do it: pipelines, chats, streams, and what they get wrong."""

import gc
import random
import threading

import psutil
import pytest
import torch
import transformers
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline
from transformers.generation.streamers import BaseStreamer

from hf_cpu_accel import accelerate_for_cpu, accelerated
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite.decoder import deferred
from tests.acceptance.writer import GREEDY, make_model, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


pytestmark = pytest.mark.usefixtures("one_thread")


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cache?"}]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 30, "num_return_sequences": 2},
        {"num_beams": 3},
        {"do_sample": False, "stop_sequence": "e"},
        {"do_sample": False, "return_full_text": False},
    ],
    ids=["greedy", "sampling", "beams", "stop sequence", "new text only"],
)
@pytest.mark.parametrize(
    "asked", ["Once upon", ["Once upon", "A longer prompt than that"], CHAT, [CHAT, CHAT[1:]]],
    ids=["text", "texts", "chat", "chats"],
)  # fmt: skip
def test_text_generation_pipelines(tokenizer, eager, model, asked, settings):
    answers = []
    for each in (eager, model):
        torch.manual_seed(1)
        generator = pipeline("text-generation", model=each, tokenizer=tokenizer)
        answers.append(generator(asked, max_new_tokens=12, batch_size=2, **settings))
    assert answers[0] == answers[1]


def test_a_pipeline_is_accelerated_in_one_line(tokenizer, eager):
    generator = pipeline("text-generation", model=make_model(), tokenizer=tokenizer)
    expected = generator("In the beginning", **GREEDY)
    with accelerated(generator, dtype="float32"):
        assert "generate" in vars(generator.model)
        assert generator("In the beginning", **GREEDY) == expected
    assert "generate" not in vars(generator.model)
    assert generator("In the beginning", **GREEDY) == expected


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_summaries_and_translations(tokenizer, family):
    sizes = {
        "vocab_size": 259,
        "d_model": 64,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    if family == "t5":
        config = transformers.T5Config(d_kv=16, d_ff=96, num_layers=2, num_heads=4, **sizes)
        model = transformers.T5ForConditionalGeneration(config).eval()
    else:
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
        config = transformers.BartConfig(
            encoder_attention_heads=4, decoder_attention_heads=4, forced_eos_token_id=1, **layers, **sizes
        )
        model = transformers.BartForConditionalGeneration(config).eval()
    inputs = tokenizer(["A text to be made short.", "Another one"], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 20, "no_repeat_ngram_size": 3}
    expected = [model.generate(**inputs, **settings, num_beams=beams) for beams in (1, 4)]
    accelerate_for_cpu(model, dtype="float32")
    for beams, tokens in zip((1, 4), expected, strict=True):
        assert model.generate(**inputs, **settings, num_beams=beams).tolist() == tokens.tolist()


def test_text_appears_while_it_is_generated(tokenizer, eager, model, capsys):
    inputs = tokenizer("Tell me", return_tensors="pt")
    printed = []
    for each in (eager, model):
        each.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].strip()) > 4


def test_text_can_be_read_from_another_thread(tokenizer, eager, model):
    inputs = tokenizer("Tell me", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = eager.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(expected)


class Recorder(BaseStreamer):
    def __init__(self, stop_after=None, error=KeyboardInterrupt):
        self.got, self.ended, self.stop_after, self.error = [], False, stop_after, error

    def put(self, value):
        self.got.append(value.tolist())
        if len(self.got) == self.stop_after:
            raise self.error

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_token_by_token(tokenizer, eager, model):
    inputs = tokenizer(["Tell me", "more"], return_tensors="pt", padding=True)
    recorders = Recorder(), Recorder()
    for each, recorder in zip((eager, model), recorders, strict=True):
        each.generate(**inputs, **GREEDY, streamer=recorder)
        assert recorder.ended
    assert recorders[0].got == recorders[1].got
    assert len(recorders[0].got) == 17


@pytest.mark.parametrize("when", [1, 2, 7])
def test_an_interrupt_leaves_a_model_that_works(tokenizer, eager, model, when):
    inputs = tokenizer("Tell me", return_tensors="pt")
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **GREEDY, streamer=Recorder(stop_after=when))
    assert torch.equal(model.generate(**inputs, **GREEDY), eager.generate(**inputs, **GREEDY))


def test_a_streamer_that_was_closed_ends_the_call_and_no_other(tokenizer, eager, model):
    inputs = tokenizer("Tell me", return_tensors="pt")
    for each in (eager, model):
        recorder = Recorder(stop_after=4, error=BrokenPipeError)
        with pytest.raises(BrokenPipeError):
            each.generate(**inputs, **GREEDY, streamer=recorder)
        assert len(recorder.got) == 4
        assert not recorder.ended
    assert torch.equal(model.generate(**inputs, **GREEDY), eager.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_a_cache_can_be_used_on_after_an_interrupt(tokenizer, kv_cache):
    """It holds the tokens whose step was through, as transformers' own does, and the conversation goes on from there."""
    inputs = tokenizer("Tell me", return_tensors="pt")
    models = make_model(), accelerate_for_cpu(make_model(), dtype="float32", kv_cache=kv_cache)
    caches = DynamicCache(config=models[0].config), CPUCache(models[1].config)
    answers = []
    for each, cache in zip(models, caches, strict=True):
        recorder = Recorder(stop_after=5)
        with pytest.raises(KeyboardInterrupt):
            each.generate(**inputs, **GREEDY, past_key_values=cache, streamer=recorder)
        so_far = torch.cat([inputs["input_ids"], torch.tensor(recorder.got[1:]).T], dim=1)
        answers.append((cache.get_seq_length(), each.generate(so_far, **GREEDY, past_key_values=cache)))
    assert answers[0][0] == answers[1][0] == inputs["input_ids"].shape[1] + 3
    assert torch.equal(answers[0][1], answers[1][1])


def test_an_interrupt_inside_of_a_layer(tokenizer, eager, model):
    """Between two layers, when others of the same step have run or wait to be run together."""
    inputs, asked = tokenizer("Tell me", return_tensors="pt"), []

    def interrupt(module, arguments):
        asked.append(1)
        if len(asked) == 6:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **GREEDY)
    hook.remove()
    assert torch.equal(model.generate(**inputs, **GREEDY), eager.generate(**inputs, **GREEDY))


def test_prompts_of_any_length_need_no_set_up(monkeypatch):
    """Neither are layers bound again, nor is anything compiled or raced, for prompts of 1 to 2048 tokens."""
    model = accelerate_for_cpu(make_model(limit=4096), dtype="int8", providers="own", verify=True)
    bound, bind = [], deferred.bind
    monkeypatch.setattr(deferred, "bind", lambda layers: bound.append(len(layers)) or bind(layers))
    torch._dynamo.utils.counters.clear()
    for length in (5, 1, 2, 9, 33, 100, 511, 512, 513, 1200, 2048):
        for batch in (1, 3) if length < 100 else (1,):
            model.generate(torch.full((batch, length), 7), do_sample=False, max_new_tokens=3)
    assert bound == [2]  # both layers, once
    assert not torch._dynamo.utils.counters["stats"]


def test_stop_strings(tokenizer, eager, model):
    inputs = tokenizer("Tell me", return_tensors="pt")
    stop = "LL"
    tokens = [
        each.generate(**inputs, **GREEDY, stop_strings=[stop], tokenizer=tokenizer) for each in (eager, model)
    ]
    assert torch.equal(*tokens)
    assert tokenizer.decode(tokens[0][0]).endswith(stop)
    assert tokens[0].shape[1] < 7 + GREEDY["max_new_tokens"]


def test_many_generations_leave_memory_flat(model):
    process, choice = psutil.Process(), random.Random(0)

    def generations(count):
        for _ in range(count):
            length, beams = choice.randint(1, 200), choice.choice([1, 1, 1, 2])
            ids = torch.full((choice.randint(1, 3), length), 7)
            model.generate(ids, do_sample=beams == 1, num_beams=beams, max_new_tokens=choice.randint(1, 12))
        gc.collect()
        return process.memory_info().rss

    generations(15)
    before = generations(15)
    after = generations(30)
    assert after - before < 0.02 * before


def test_continuous_batching_runs_on_the_packed_model(eager, model):
    settings = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=0
    )
    small = transformers.ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12] * 7]
    answers, implementation = [], model.config._attn_implementation
    for each in (eager, model):
        outputs = each.generate_batch(prompts, generation_config=settings, continuous_batching_config=small)
        answers.append([output.generated_tokens for output in outputs.values()])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    assert model.config._attn_implementation == implementation == "hf_cpu_accel"
    ids = torch.tensor(prompts[:1])
    assert model.generate(ids, **{**GREEDY, "max_new_tokens": 6})[0, 4:].tolist() == answers[1][0]
