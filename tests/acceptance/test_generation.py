"""Text generation as users do it: pipelines, chats, streams, and what they get wrong."""

import gc
import random
import threading

import psutil
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, TextIteratorStreamer, TextStreamer, pipeline
from transformers.generation.streamers import BaseStreamer

from hf_cpu_accel import accelerate_for_cpu, accelerated, restore
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite import pending

PAD, END, BEGIN = "<pad>", "</s>", "<s>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = {"do_sample": False, "max_new_tokens": 16}


def make_tokenizer():
    """One token per byte: made here, so that nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, END, BEGIN, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        bos_token=BEGIN,
        padding_side="left",
        chat_template=TEMPLATE,
        return_token_type_ids=False,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_model(limit=512):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
        model.lm_head.weight[3:36] *= 0.01  # rather characters that can be printed
    return model


@pytest.fixture
def model():
    return accelerate_for_cpu(make_model(), dtype="float32")


@pytest.fixture(scope="module")
def eager():
    return make_model()


@pytest.fixture(autouse=True)
def _one_thread(_seed_and_threads):
    torch.set_num_threads(1)


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
    model = accelerate_for_cpu(make_model(limit=4096), dtype="int8", providers="own")
    bound, bind = [], pending.bind
    monkeypatch.setattr(pending, "bind", lambda layers: bound.append(len(layers)) or bind(layers))
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


def outcome(function):
    """What a call gives: its tokens, or the kind of its error, and the message if transformers looked for it."""
    try:
        return function().tolist()
    except (ValueError, TypeError) as error:
        return type(error), str(error)
    except Exception as error:
        return type(error)


BAD = {
    "no prompt": lambda model: model.generate(**GREEDY),
    "a mask that is too short": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.ones(2, 4, dtype=torch.long), **GREEDY
    ),
    "a padded mask that is too short": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1]] * 2), **GREEDY
    ),
    "a mask of another batch": lambda model: model.generate(
        torch.ones(2, 6, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 3), **GREEDY
    ),
    "tokens outside of the vocabulary": lambda model: model.generate(torch.tensor([[5, 400]]), **GREEDY),
    "floating point tokens": lambda model: model.generate(torch.ones(1, 4), **GREEDY),
    "a list": lambda model: model.generate([[5, 6, 7]], **GREEDY),
    "settings as a dictionary": lambda model: model.generate(
        torch.tensor([[5, 6]]), generation_config={"top_k": 3}
    ),
    "an unknown keyword": lambda model: model.generate(torch.tensor([[5, 6]]), **GREEDY, topk=3),
    "an argument too many": lambda model: model.generate(*[None] * 20),
    "a prompt longer than max_length": lambda model: model.generate(torch.tensor([[5, 6, 7]]), max_length=2),
    "no tokens to generate": lambda model: model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=0),
    "a contradiction": lambda model: model.generate(
        torch.tensor([[5, 6]]), num_return_sequences=2, do_sample=False
    ),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
@pytest.mark.filterwarnings("ignore")
def test_bad_input_is_answered_as_by_transformers(eager, model, call):
    expected, answer = outcome(lambda: call(eager)), outcome(lambda: call(model))
    assert answer == expected
    good = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(good, **GREEDY), eager.generate(good, **GREEDY))


def test_an_empty_prompt_is_refused(eager, model):
    """transformers gives an error about shapes from inside of the model."""
    with pytest.raises(ValueError, match=r"\(2, 0\): the prompt is empty"):
        model.generate(torch.zeros(2, 0, dtype=torch.long), **GREEDY)
    good = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(good, **GREEDY), eager.generate(good, **GREEDY))


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_prompt_beyond_the_limit_of_the_model(position):
    """Learned positions end there; rotary ones go on, and nobody says that it is good."""
    if position == "learned":
        settings = {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**settings, eos_token_id=1, bos_token_id=2)
        ).eval()
    else:
        model = make_model(limit=32)
    outcomes = []
    for _ in range(2):
        outcomes.append(
            [outcome(lambda n=n: model.generate(torch.full((1, n), 7), **GREEDY)) for n in (40, 30, 5)]
        )
        accelerate_for_cpu(model, dtype="float32")
    assert outcomes[0] == outcomes[1]


def test_a_cache_of_another_model_or_batch_is_refused(model):
    asked = {**GREEDY, "return_dict_in_generate": True}
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = model.generate(ids, **asked).past_key_values
    longer = torch.cat([ids, torch.full((1, 30), 9)], dim=1)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**model.config.to_dict(), "num_key_value_heads": 4})
    ).eval()
    accelerate_for_cpu(other, dtype="float32")
    with pytest.raises(ValueError, match=r"2 heads of 16 features.*accepted is a cache of the same model"):
        other.generate(longer, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"batch size 1 .*but batch size 2"):
        model.generate(longer.repeat(2, 1), past_key_values=cache, **GREEDY)
    deeper = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 3})
    ).eval()
    accelerate_for_cpu(deeper, dtype="float32")
    with pytest.raises(ValueError, match="for 2 layers"):
        deeper.generate(longer, past_key_values=cache, **GREEDY)
    expected = restore(model).generate(longer, **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    cache = model.generate(ids, **asked).past_key_values
    assert model.generate(ids, **GREEDY).shape == (1, 20)
    assert torch.equal(model.generate(longer, **GREEDY), expected)


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
