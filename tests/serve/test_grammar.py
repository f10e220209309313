"""JSON mode and forced calls: a model that writes noise writes what it has to, and nothing is left unenforced in silence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from starlette.testclient import TestClient

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.language.grammar import Grammars
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.limits import BadInput
from hf_cpu_accel.serve.models import Models
from tests.serve import tiny

CHAT: list[Any] = [{"role": "user", "content": "hello"}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["sun", "rain"]},
    },
    "required": ["city", "days", "kind"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": {"$ref": "#/$defs/hour", "$defs": {
        "hour": {"type": "object", "properties": {"hour": {"enum": [0, 12]}}, "required": ["hour"],
                 "additionalProperties": False}}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def ai() -> Iterator[openai.OpenAI]:
    writer = tiny.writer(positions=1024, vocabulary=256)
    endless = tiny.writer(positions=1024, vocabulary=256, end=None)
    models = [
        LanguageModel("writer", writer, tiny.byte_tokenizer()),
        LanguageModel("plain", writer, tiny.byte_tokenizer(tiny.PLAIN_CHAT)),
        LanguageModel("endless", endless, tiny.byte_tokenizer()),
    ]
    client: Any = TestClient(Service(Models(models)).app, raise_server_exceptions=False)
    yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)
    for model in models:
        assert model.close(30)


def is_place(value: Any) -> bool:
    return (
        set(value) == {"city", "days", "kind"}
        and isinstance(value["city"], str)
        and value["days"] in range(100)
        and value["kind"] in ("sun", "rain")
    )


@pytest.mark.parametrize("model", ["writer", "plain"])
@pytest.mark.parametrize("seed", range(4))
def test_json_of_a_schema(ai: openai.OpenAI, model: str, seed: int) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": seed, "max_tokens": 900}
    answer = ai.chat.completions.create(model=model, messages=CHAT, response_format=FORMAT, **options)
    content = answer.choices[0].message.content
    assert content is not None
    assert is_place(json.loads(content))
    assert answer.choices[0].finish_reason == "stop"
    pieces = ai.chat.completions.create(
        model=model, messages=CHAT, response_format=FORMAT, stream=True, **options
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == content


def test_a_json_object(ai: openai.OpenAI) -> None:
    """Noise hardly comes to an end, so the beginning is looked at: all that is missing can be added."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    answer = ai.chat.completions.create(
        model="writer", messages=CHAT, max_tokens=60, response_format={"type": "json_object"}
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    tokenizer = tiny.byte_tokenizer()
    any_object = LLMatcher(
        from_tokenizer(tokenizer, eos_token=0), LLMatcher.grammar_from_json_schema({"type": "object"})
    )
    assert any_object.consume_tokens(tokenizer(content)["input_ids"])
    free = ai.chat.completions.create(model="writer", messages=CHAT, max_tokens=60)
    assert not (free.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [None, "weather", "time"])
def test_forced_calls(ai: openai.OpenAI, name: str | None, stream: bool) -> None:
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    answer = ai.chat.completions.create(
        model="writer", messages=CHAT, tools=TOOLS, tool_choice=choice, max_tokens=900, stream=stream
    )
    chunks = list(answer) if stream else None
    if chunks is None:
        choice = answer.choices[0]
        (call,), reason, said = choice.message.tool_calls, choice.finish_reason, choice.message.content
    else:
        deltas = [chunk.choices[0].delta for chunk in chunks]
        ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        reason, said = chunks[-1].choices[0].finish_reason, "".join(delta.content or "" for delta in deltas)
    assert reason == "tool_calls"
    assert not said
    assert call.function.name in (("weather", "time") if name is None else (name,))
    arguments = json.loads(call.function.arguments)
    assert is_place(arguments) if call.function.name == "weather" else arguments["hour"] in (0, 12)


def test_incomplete_calls_are_text(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(
        model="writer", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=10
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    assert '{"name": '.startswith((answer.choices[0].message.content or "-")[:9])


def test_other_rows_are_unchanged(ai: openai.OpenAI) -> None:
    import concurrent.futures

    def free() -> str | None:
        return (
            ai.chat.completions.create(model="writer", messages=CHAT, max_tokens=40)
            .choices[0]
            .message.content
        )

    def bound() -> str | None:
        found = ai.chat.completions.create(
            model="writer", messages=CHAT, response_format=FORMAT, max_tokens=900
        )
        return found.choices[0].message.content

    alone = free()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        both = [pool.submit(free), pool.submit(bound), pool.submit(free), pool.submit(bound)]
        assert both[0].result() == both[2].result() == alone
        assert both[1].result() == both[3].result()
        assert is_place(json.loads(both[1].result() or ""))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "object", "properties": {"a": {"type": "number", "not": {}}}}, "Unimplemented keys: ..not"),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "http://127.0.0.1/schema"}, "does not fetch"),
    ],
)
def test_unsupported_schemas_are_rejected(ai: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": options}}
    with pytest.raises(openai.BadRequestError, match=f"the JSON schema is not supported: .*{message}"):
        ai.chat.completions.create(model="writer", messages=CHAT, response_format=form)


def test_models_without_end_tokens_are_rejected(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model, which has no end token"):
        ai.chat.completions.create(
            model="endless", messages=CHAT, response_format={"type": "json_object"}, max_tokens=4
        )


def test_json_needs_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(
        BadInput,
        match=r'llguidance, which is not installed on the server: run pip install "hf_cpu_accel\[serve\]"',
    ):
        Grammars(tiny.byte_tokenizer(), [0]).json({"type": "object"})


def test_allowed_tokens_keep_their_scores() -> None:
    """Also of a model that has fewer or more rows than its tokenizer has tokens."""
    tokenizer = tiny.byte_tokenizer()
    for rows in (94, 256, 300):
        mask = Grammars(tokenizer, [0]).json({"enum": [1, 12]})
        ids, scores = torch.tensor([[5, 6]]), torch.randn(1, rows)
        for token, follows in (("1", ["1"]), ("2", ["2", "!"]), ("!", ["!"])):
            found = mask(ids, scores.clone())
            allowed = tokenizer("".join(follows))["input_ids"]
            assert sorted(found[0].isfinite().nonzero()[:, 0].tolist()) == sorted(allowed)
            assert torch.equal(found[0, allowed], scores[0, allowed])
            ids = torch.cat([ids, torch.tensor([tokenizer(token)["input_ids"]])], dim=1)


def test_whitespace_is_limited() -> None:
    tokenizer = tiny.byte_tokenizer()
    mask = Grammars(tokenizer, [0]).json({"type": "object"})
    ids = torch.tensor([[5]])
    mask(ids, torch.randn(1, 256))
    (opening,), (blank,) = tokenizer("{")["input_ids"], tokenizer(" ")["input_ids"]
    ids = torch.cat([ids, torch.tensor([[opening]])], dim=1)
    for _ in range(40):
        if not mask(ids, torch.zeros(1, 256))[0, blank].isfinite():
            return
        ids = torch.cat([ids, torch.tensor([[blank]])], dim=1)
    raise AssertionError("40 blanks, and it may go on")
