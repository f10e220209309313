"""`/v1/chat/completions` and `/v1/completions` through OpenAI's client: the tokens of `generate`, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from starlette.testclient import TestClient

from hf_cpu_accel.serve.http.app import Service
from hf_cpu_accel.serve.http.metrics import Metrics
from hf_cpu_accel.serve.language.model import LanguageModel
from hf_cpu_accel.serve.models import Models
from tests.serve import tiny

CHAT: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
NEW = 12


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, LanguageModel]]:
    options = {"rows": 2, "waiting": 4}
    made = {
        "writer": LanguageModel("writer", tiny.writer(), tiny.byte_tokenizer(), **options),
        "plain": LanguageModel("plain", tiny.writer(), tiny.byte_tokenizer(tiny.PLAIN_CHAT), **options),
        "mute": LanguageModel("mute", tiny.writer(), tiny.byte_tokenizer(None), **options),
    }
    yield made
    for model in made.values():
        assert model.close(30)


@pytest.fixture
def client(models: dict[str, LanguageModel]) -> TestClient:
    return TestClient(Service(Models(list(models.values())), Metrics()).app, raise_server_exceptions=False)


@pytest.fixture
def ai(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)  # type: ignore[arg-type]


def greedy(prompt: str, new: int = NEW) -> str:
    """What `generate` says after a prompt."""
    tokenizer, model = tiny.byte_tokenizer(), tiny.writer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
    return str(tokenizer.decode([token for token in written if token != 0]))


def test_completions_equal_generate(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model="writer", prompt="hello", max_tokens=NEW)
    assert answer.choices[0].text == greedy("hello")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        NEW,
        5 + NEW,
    )


def test_chats_equal_template_and_generate(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(model="writer", messages=CHAT, max_tokens=NEW)
    assert (answer.choices[0].message.content or "") == greedy("u:hello;a:")
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("u:hello;a:")
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert (
        ai.chat.completions.create(model="writer", messages=parts, max_tokens=NEW).choices[0].message
        == answer.choices[0].message
    )


def test_streams_join_to_the_complete_answer(ai: openai.OpenAI, client: TestClient) -> None:
    whole = ai.chat.completions.create(model="writer", messages=CHAT, max_tokens=NEW)
    chunks = list(
        ai.chat.completions.create(
            model="writer", messages=CHAT, max_tokens=NEW, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        == whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NEW
    assert len({chunk.id for chunk in chunks}) == 1

    body = {"model": "writer", "prompt": "hello", "max_tokens": NEW, "stream": True}
    lines = [line for line in client.post("/v1/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    told = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = ai.completions.create(model="writer", prompt="hello", max_tokens=NEW).choices[0].text
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == text
    assert {tuple(sorted(chunk["choices"][0])) for chunk in told} == {
        ("finish_reason", "index", "logprobs", "text")
    }
    assert told[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": CHAT})],
)
def test_each_chunk_has_openais_keys(
    client: TestClient, path: str, asked: dict[str, Any], with_usage: bool
) -> None:
    """finish_reason is null until the last choice; with include_usage so is usage until the last chunk."""
    body = {"model": "writer", "max_tokens": 4, "stream": True, **asked}
    lines = client.post(path, json=body | {"stream_options": {"include_usage": with_usage}}).text.split(
        "\n\n"
    )
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) > 2
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {choice["logprobs"] for choice in choices} == {None}
    assert all(
        "content" not in choice.get("delta", {}) or choice["delta"]["content"] is not None
        for choice in choices
    )
    assert [chunk["usage"] for chunk in chunks[:-1] if with_usage] == [None] * (
        len(choices) if with_usage else 0
    )
    assert [chunk for chunk in chunks if chunk.get("usage")] == chunks[-1:] * with_usage


def test_several_prompts_have_several_choices(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model="writer", prompt=["hello", "time"], max_tokens=5)
    alone = [
        ai.completions.create(model="writer", prompt=prompt, max_tokens=5).choices[0].text
        for prompt in ("hello", "time")
    ]
    assert [choice.text for choice in answer.choices] == alone
    ids = tiny.byte_tokenizer()("time")["input_ids"]
    assert ai.completions.create(model="writer", prompt=ids, max_tokens=5).choices[0].text == alone[1]


def test_a_stop_string_ends_an_answer(ai: openai.OpenAI) -> None:
    whole = ai.completions.create(model="writer", prompt="hello", max_tokens=NEW).choices[0].text
    stop = whole[3:5]
    stopped = ai.completions.create(model="writer", prompt="hello", max_tokens=NEW, stop=[stop, "never"])
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_seeds_repeat_samples(ai: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = ai.completions.create(
            model="writer", prompt="hello", max_tokens=NEW, temperature=1.5, top_p=0.95, seed=seed
        )
        return answer.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_templates_get_the_tools_and_formats_that_they_support(ai: openai.OpenAI) -> None:
    with_tools = ai.chat.completions.create(model="writer", messages=CHAT, max_tokens=4, tools=TOOLS)
    assert with_tools.usage is not None
    assert with_tools.usage.prompt_tokens == len("tools:weather;u:hello;a:")
    none = ai.chat.completions.create(
        model="writer", messages=CHAT, max_tokens=4, tools=TOOLS, tool_choice="none"
    )
    assert none.usage is not None
    assert none.usage.prompt_tokens == len("u:hello;a:")
    for name, prompt in (
        ("writer", "json;u:hello;a:"),
        ("plain", "u:hello;a:"),
    ):  # it is enforced in any case
        as_json = ai.chat.completions.create(
            model=name, messages=CHAT, max_tokens=4, response_format={"type": "json_object"}
        )
        assert as_json.usage is not None
        assert as_json.usage.prompt_tokens == len(prompt)
    with pytest.raises(openai.BadRequestError, match="the chat template of 'plain' does not support tools"):
        ai.chat.completions.create(model="plain", messages=CHAT, tools=TOOLS)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages: List should have at least 1 item"),
    ({"messages": "hello"}, 400, "messages: Input should be a valid list"),
    ({"messages": [{"role": "boss", "content": "a"}]}, 400, "messages.0.role: Input should be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "content parts of type 'image_url'",
    ),
    ({"max_tokens": -5}, 400, "max_tokens: Input should be greater than or equal to 1"),
    ({"max_tokens": "5"}, 400, "max_tokens: Input should be a valid integer"),
    ({"temperature": -0.1}, 400, "temperature: Input should be greater than or equal to 0"),
    ({"top_p": 0}, 400, "top_p: Input should be greater than 0"),
    ({"n": 2}, 400, "n=2 is not supported; accepted: 1"),
    ({"logprobs": True}, 400, "logprobs=True is not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty=0.5 is not supported"),
    ({"stop": [""]}, 400, "stop: expected a text, or a list of at most 16 texts"),
    ({"tool_choice": "required"}, 400, "tool_choice='required' needs a tool that is not in tools"),
    ({"tool_choice": "always"}, 400, "Input should be 'auto', 'none' or 'required'"),
    ({"tools": [{"type": "function", "function": {}}]}, 400, "tools.0.function.name: Field required"),
    (
        {"response_format": {"type": "xml"}},
        400,
        "response_format.type: Input should be 'text', 'json_object' or",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        400,
        "json_schema is missing; pass json_schema with type='json_schema', and only with it",
    ),
    (
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
        400,
        "response_format is not supported with tools",
    ),
    ({"model": "mute"}, 400, "model 'mute' has no chat template: use /v1/completions"),
    ({"model": "other"}, 404, "model 'other' does not exist; this server has"),
    ({"nonsense": 1}, 400, "nonsense: Extra inputs are not permitted"),
    ({"max_tokens": 1000}, 413, "the prompt has 10 tokens and max_tokens=1000; together at most 96"),
    ({"messages": [{"role": "user", "content": "a" * 500}]}, 413, "the prompt has 505 tokens"),
]


@pytest.mark.parametrize(("fields", "status", "message"), REFUSED)
def test_wrong_chat_requests_are_rejected(
    client: TestClient, fields: dict[str, Any], status: int, message: str
) -> None:
    response = client.post("/v1/chat/completions", json={"model": "writer", "messages": CHAT, **fields})
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [999]}, "the prompt contains the token id 999; accepted are 0 to 93"),
        ({"prompt": 5}, "prompt: expected a text"),
        ({"prompt": ["a", "b"], "stream": True}, "stream=True is not supported with 2 prompts"),
        ({"prompt": "a", "echo": True}, "echo=True is not supported"),
    ],
)
def test_wrong_completion_requests_are_rejected(
    client: TestClient, fields: dict[str, Any], message: str
) -> None:
    response = client.post("/v1/completions", json={"model": "writer", **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_full_queues_are_reported(client: TestClient, models: dict[str, LanguageModel]) -> None:
    """All or none of a request's prompts are taken."""
    response = client.post(
        "/v1/completions", json={"model": "writer", "prompt": ["a"] * 40, "max_tokens": 80}
    )
    assert response.status_code == 429
    assert "try again later" in response.json()["error"]["message"]
    assert (
        client.post("/v1/completions", json={"model": "writer", "prompt": "a", "max_tokens": 1}).status_code
        == 200
    )


def test_tokens_are_counted(client: TestClient, models: dict[str, LanguageModel]) -> None:
    client.post("/v1/completions", json={"model": "writer", "prompt": "hello", "max_tokens": 7})
    text = client.get("/metrics").text
    assert 'hf_cpu_accel_tokens_total{kind="generated",model="writer"} 7.0' in text
    assert 'hf_cpu_accel_tokens_total{kind="prompt",model="writer"} 5.0' in text
    assert 'hf_cpu_accel_rows_running{model="writer"}' in text
    assert 'hf_cpu_accel_prefix_cache_bytes{model="writer"}' in text
