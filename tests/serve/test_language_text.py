"""`TextStream`, `StopStrings` and `Sampling`: text as it comes is the text of the whole, up to where it is to stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.cli.serving.utils import ReasoningText, ToolCall

from hf_cpu_accel.serve.language.parser import parser
from hf_cpu_accel.serve.language.sampling import Sampling, processors
from hf_cpu_accel.serve.language.text import Prompt, StopStrings, TextStream
from tests.serve.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
BEFORE = TOKENIZER("<|im_start|>assistant\n")["input_ids"]


def stream(
    model_type: str = "llama", stop: tuple[str, ...] = (), tools: Any = None, is_chat: bool = False
) -> TextStream:
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))

    marks = parser(model, TOKENIZER, BEFORE, tools) if is_chat else None
    return TextStream(TOKENIZER, frozenset({0}), Prompt(BEFORE), stop, marks)


def pieces(text: TextStream, said: str) -> list[Any]:
    fed = [piece for token in TOKENIZER(said)["input_ids"] for piece in text.feed(token)]
    return [*text.begin(), *fed, *text.finish()]


def test_characters_are_complete() -> None:
    text = stream()
    found = [text.feed(token) for token in TOKENIZER("aé€")["input_ids"]]
    assert found == [["a"], [], ["é"], [], [], ["€"]]
    assert text.tokens == 6


def test_the_end_token_is_not_part_of_the_text() -> None:
    text = stream()
    assert text.feed(5) == [TOKENIZER.decode([5])]
    assert text.feed(0) == []
    assert (text.finish(), text.tokens) == ([], 2)


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    text = stream(stop=("END",))
    assert "".join(pieces(text, "one EN END two")) == "one EN "
    assert text.is_stopped


def test_partial_stop_strings_are_passed_on() -> None:
    text = stream(stop=("END",))
    assert "".join(pieces(text, "one EN")) == "one EN"
    assert not text.is_stopped


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_are_found_however_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    stop, shown, left = StopStrings(stops), "", text
    while left:
        length = data.draw(st.integers(1, len(left)))
        shown += stop.feed(left[:length])
        left = left[length:]
        assert not any(string in shown for string in stops)
    shown += stop.finish()
    ends = [text.find(string) for string in stops if string in text]
    assert stop.has_matched == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(string in shown for string in stops)


def test_reasoning_and_calls_are_split_off() -> None:
    said = '<think>hm</think>Hello.<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    text = stream("qwen2", tools=tools, is_chat=True)
    found = pieces(text, said)
    assert "".join(piece for piece in found if isinstance(piece, ReasoningText)) == "hm"
    plain = [piece for piece in found if isinstance(piece, str) and not isinstance(piece, ReasoningText)]
    assert "".join(plain).strip() == "Hello."
    assert [piece for piece in found if isinstance(piece, ToolCall)] == [
        ToolCall("weather", '{"city": "Bern"}')
    ]
    assert text.has_tool_calls


def test_incomplete_calls_are_text() -> None:
    text = stream("qwen2", is_chat=True)
    assert not any(isinstance(piece, ToolCall) for piece in pieces(text, 'a<tool_call>{"name": "wea'))
    assert not text.has_tool_calls


@pytest.mark.parametrize(
    ("asked", "draws", "kinds"),
    [
        (Sampling(), False, []),
        (Sampling(temperature=0.0), False, []),
        (Sampling(temperature=0.5), True, ["Temperature", "TopK"]),
        (Sampling(temperature=1.0, top_p=0.5), True, ["TopK", "TopP"]),
        (Sampling(top_p=0.5, top_k=3), True, ["TopK", "TopP"]),
    ],
)
def test_sampling_changes_the_models_settings(asked: Sampling, draws: bool, kinds: list[str]) -> None:
    model = GenerationConfig(do_sample=False, top_k=50)
    config = asked.config(model)
    assert bool(config.do_sample) == draws
    found = processors(config) or []
    assert [type(one).__name__.removesuffix("LogitsWarper") for one in found] == kinds
    assert model.temperature in (None, 1.0)  # the model's own stay


def test_the_repetition_penalty_of_the_model_applies() -> None:
    config = Sampling().config(GenerationConfig(repetition_penalty=1.3))
    assert [type(one).__name__ for one in processors(config) or []] == ["RepetitionPenaltyLogitsProcessor"]
