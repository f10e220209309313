"""Thoughts and calls in every format that transformers knows, behind templates that have its anchor and ones that do not."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.cli.serving import utils
from transformers.cli.serving.utils import ReasoningText, ToolCall

from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.language.parser import Piece, parser
from hf_cpu_accel.serve.language.text import TextStream
from tests.serve import tiny

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
# Of each kind of model: how the type's own chat template opens an answer, and a call as the model writes it.
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'
KNOWN = {
    "qwen2": ("<|im_start|>assistant\n", "<think>", "</think>", HERMES),
    "qwen3_5": ("<|im_start|>assistant\n", "<think>\n", "</think>", XML),
    "gemma4": ("<|turn>model\n", "<|channel>thought\n", "<channel|>", GEMMA),
}
# As Hermes' templates say how a tool is called: no call, and no JSON either.
HOWTO = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
WORDS = (
    "{% if tools %}Tools: {{ tools[0].function.name }}. Say HOWTO{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
).replace("HOWTO", HOWTO)
MESSAGES = [
    {"role": "user", "content": "Secret question?"},
    {"role": "assistant", "content": "<think>An old thought.</think>Old answer."},
    {"role": "user", "content": "And in Bern?"},
]


class Talk:
    """A chat whose template ends with `opening`; the model says what it is told to."""

    def __init__(self, model_type: str, opening: str, response_template: Any = None) -> None:
        self.tokenizer = tiny.byte_tokenizer(f"{WORDS}{{{{ {json.dumps(opening)} }}}}")
        self.tokenizer.response_template = response_template
        self.model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))

    def pieces(self, said: str) -> list[Piece]:
        chat: Any = SimpleNamespace(
            tokenizer=self.tokenizer, name="talk", _check_template=lambda *names: None
        )
        prompt = LanguageModel.chat_prompt(chat, MESSAGES, TOOLS)
        text = TextStream(
            self.tokenizer,
            frozenset(),
            prompt,
            parser=parser(self.model, self.tokenizer, prompt.ids, prompt.tools),
        )
        fed = [piece for token in self.tokenizer(said)["input_ids"] for piece in text.feed(token)]
        return [*text.begin(), *fed, *text.finish()]


def parts(pieces: list[Piece]) -> tuple[str, str, list[ToolCall]]:
    """What is said, thought, called."""
    thought = "".join(piece for piece in pieces if isinstance(piece, ReasoningText))
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    said = "".join(
        piece for piece in pieces if isinstance(piece, str) and not isinstance(piece, ReasoningText)
    )
    return said.strip(), thought.strip(), calls


CALLED = [ToolCall("weather", '{"city": "Bern"}')]
FOREIGN = ["assistant:", "[/INST]", "", "### Response:\n"]


def test_all_formats_of_transformers_are_here() -> None:
    assert len(utils._RESPONSE_TEMPLATE_FALLBACKS) == len(KNOWN)
    assert all(any(kind in kinds for kinds in utils._RESPONSE_TEMPLATE_FALLBACKS) for kind in KNOWN)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("opening", ["its own", *FOREIGN])
def test_nothing_of_the_prompt_is_in_the_answer(kind: str, opening: str) -> None:
    own, think, thought, call = KNOWN[kind]
    opening = own if opening == "its own" else opening
    talk = Talk(kind, opening)
    assert parts(talk.pieces("It is dry.")) == ("It is dry.", "", [])
    assert parts(talk.pieces(f"{think}Hm.{thought}Wait.{call}")) == ("Wait.", "Hm.", CALLED)
    assert parts(talk.pieces(call + call)) == ("", "", CALLED * 2)
    opened = Talk(kind, opening + think)
    assert parts(opened.pieces(f"Hm.{thought}It is dry.")) == ("It is dry.", "Hm.", [])
    closed = Talk(kind, f"{opening}{think}\n\n{thought}\n\n")
    assert parts(closed.pieces(f"It is dry.{call}")) == ("It is dry.", "", CALLED)


@pytest.mark.parametrize("opening", ["<|im_start|>assistant\n", *FOREIGN])
def test_a_tokenizer_may_bring_its_format(opening: str) -> None:
    brought = copy.deepcopy(utils.get_response_template(None, Talk("qwen2", "").model))
    assert parts(Talk("llama", opening, brought).pieces(f"Wait.{HERMES}")) == ("Wait.", "", CALLED)


@pytest.mark.parametrize("opening", FOREIGN)
def test_unknown_formats_are_text(opening: str) -> None:
    said = f"<think>Hm.</think>Wait.{HERMES}"
    assert parts(Talk("llama", opening).pieces(said)) == (said, "", [])


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("qwen2", "Wait.<tool_call>no JSON</tool_call>End.", "Wait.no JSONEnd."),
        (
            "qwen2",
            'Wait.<tool_call>{"name": "weather"}</tool_call>End.',
            'Wait.{"name": "weather"}End.',
        ),
        ("qwen2", "Wait.<tool_call>[1]</tool_call>End.", "Wait.[1]End."),
        ("qwen2", 'Wait.<tool_call>{"name": "wea', 'Wait.{"name": "wea'),
        ("gemma4", "Wait.<|tool_call>call:weather{city:<tool_call|>End.", "Wait.{city:End."),
    ],
)
def test_invalid_calls_are_text(kind: str, said: str, expected: str) -> None:
    talk = Talk(kind, KNOWN[kind][0])
    assert parts(talk.pieces(said)) == (expected, "", [])
    after = talk.pieces(said.replace("End.", KNOWN[kind][3]))
    assert parts(after)[2] == (CALLED if "End." in said else [])
