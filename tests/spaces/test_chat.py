"""The Space `chat` without its page: a tiny writer of random weights."""

import itertools

import pytest
import torch

from hf_cpu_accel.serve.comparison import Pair
from tests.acceptance.writer import make_model, make_tokenizer
from tests.spaces.folders import module_of

chat = module_of("chat", "chat")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def pair():
    return Pair(make_model(), dtype="float32")


def test_streams_the_tokens_of_generate(pair, tokenizer):
    conversation = chat.conversation_of([], " Hello ", 12, tokenizer)
    assert conversation == [{"role": "user", "content": "Hello"}]
    inputs = chat.inputs_of(conversation, tokenizer)
    expected = pair.eager.generate(**inputs, do_sample=False, max_new_tokens=12, pad_token_id=0)
    expected = tuple(expected[0, inputs["input_ids"].shape[1] :].tolist())
    for model in (pair.eager, pair.accelerated):
        answers = list(chat.stream(model, tokenizer, conversation, 12))
        assert answers[-1].tokens == expected
        assert answers[-1].text == tokenizer.decode(expected, skip_special_tokens=True)
        assert [answer.tokens for answer in answers] == [expected[: n + 1] for n in range(len(expected))]
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(answers))


def test_continues_the_conversation(tokenizer):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi", "metadata": None},
    ]
    conversation = chat.conversation_of(history, "How?", 5, tokenizer)
    assert tokenizer.decode(chat.inputs_of(conversation, tokenizer)["input_ids"][0]) == (
        "user: Hello\nassistant: Hi\nuser: How?\nassistant: "
    )


def test_closing_the_stream_ends_the_generation(pair, tokenizer):
    steps = []
    hook = pair.eager.register_forward_hook(lambda *_: steps.append(1))
    answers = chat.stream(pair.eager, tokenizer, chat.conversation_of([], "Hello", 128, tokenizer), 128)
    next(answers)
    answers.close()  # waits for the thread
    hook.remove()
    assert len(steps) < 128


def test_error_of_the_model_is_raised(tokenizer):
    class Broken(torch.nn.Module):
        def generate(self, **_):
            raise RuntimeError("no weights")

    answers = chat.stream(Broken(), tokenizer, chat.conversation_of([], "Hello", 5, tokenizer), 5)
    with pytest.raises(RuntimeError, match="no weights"):
        list(answers)


def test_times_are_for_equal_numbers_of_tokens():
    comparison = chat.compare(chat.Answer("", (1, 2, 3, 4), 2.0), chat.Answer("", (1, 2), 0.5))
    assert comparison.rates == (2, 4)
    assert str(comparison) == "Speedup 2.00x: 500 ms instead of 1.00 s for 2 tokens"


def test_agreement_in_words():
    answers = [chat.Answer("", tokens, 1.0) for tokens in ((1, 2, 3), (1, 2), (1, 5, 3))]
    assert chat.agreement(answers[0], answers[0]).startswith("Both answers are the same")
    assert "agree in their first 1 tokens" in chat.agreement(answers[0], answers[2])
    assert "agree in their first 2 tokens" in chat.agreement(answers[0], answers[1])


@pytest.mark.parametrize(
    ("message", "new_tokens", "refusal"),
    [
        (" \n", 5, "The message is empty"),
        (1001 * "a", 5, "has 1001 characters; the limit is 1000"),
        ("a", 0, "0 new tokens were requested; enter 1 to 128"),
        ("a", 129, "129 new tokens were requested; enter 1 to 128"),
    ],
)
def test_invalid_messages_are_rejected(message, new_tokens, refusal, tokenizer):
    with pytest.raises(ValueError, match=refusal):
        chat.conversation_of([], message, new_tokens, tokenizer)


def test_long_conversations_are_rejected(tokenizer):
    history = [{"role": "user", "content": 700 * "a"}, {"role": "assistant", "content": 180 * "b"}]
    with pytest.raises(ValueError, match=r"The conversation would have 10\d\d tokens; the limit is 1024"):
        chat.conversation_of(history, 100 * "c", 50, tokenizer)
    assert len(chat.conversation_of(history, "c", 50, tokenizer)) == 3
