"""Split answers into text, reasoning and tool calls, with the parser of transformers, or for forced calls with `CallParser`."""

from __future__ import annotations

import json
from typing import Any, Protocol

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    get_response_template,
    response_events_to_chunks,
)
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

Piece = str | ReasoningText | ToolCall


class Parser(Protocol):
    """Parse the text of an answer incrementally."""

    def begin(self) -> list[Piece]:
        """Return the pieces of the answer that the chat template contains."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that this text completes."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces that the end of the answer completes."""
        ...


def parser(
    model: Any, tokenizer: Any, prompt: list[int], tools: list[dict[str, Any]] | None
) -> Parser | None:
    """Return the parser of a model; None if the marks of its reasoning and calls are unknown.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: the prompt from the chat template.
        tools: the tools of the request.
    """
    response_template = get_response_template(tokenizer, model)
    if response_template is None:
        return None
    template = load_response_template(response_template)
    return MarkParser(template, answer_prefix(template, tokenizer.decode(prompt)), tools or [])


def answer_prefix(template: ResponseTemplate, prompt: str) -> str:
    """Return the start of the answer, which the chat template wrote at the end of the prompt.

    It follows the last anchor, which starts the turn of the assistant. A custom chat template may have no anchor. Then only a mark
    at the end, such as one that opens reasoning, belongs to the answer.
    """
    anchors = [match.end() for match in template.start_anchor_re.finditer(prompt)]
    if anchors:
        return prompt[anchors[-1] :]
    marks = (field.open_re for field in template.fields.values() if field.open_re is not None)
    places = [match for mark in marks for match in mark.finditer(prompt) if not prompt[match.end() :].strip()]
    return prompt[places[-1].start() :] if places else ""


class MarkParser:
    """Parse by marks in the text. Text between the marks of a call that is not a call becomes plain text."""

    def __init__(self, template: ResponseTemplate, prefix: str, tools: list[dict[str, Any]]) -> None:
        self._template, self._tools = template, tools
        self._parser = self._new(prefix)
        self._call = ""  # text so far of the current call

    def begin(self) -> list[Piece]:
        return self._pieces(self._parser.initial_events)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for character in text:  # one by one, to keep the pieces before an error
            try:
                pieces += self._pieces(self._parser.feed(character))
            except _NO_CALL:
                pieces += self._call_as_text()
        return pieces

    def finish(self) -> list[Piece]:
        try:
            _, events = self._parser.finalize()
            return self._pieces(events)
        except _NO_CALL:
            return self._call_as_text()

    def _new(self, prefix: str) -> ResponseParser:
        return ResponseParser(self._template, prefix=prefix, tools=[*self._tools])

    def _pieces(self, events: list[dict[str, Any]]) -> list[Piece]:
        for event in events:
            if event["type"] == "region_open":
                self._call = ""
            elif event["type"] == "region_chunk" and event.get("dirty"):
                self._call += event["text"]
        pieces: list[Piece] = response_events_to_chunks(events)
        return pieces

    def _call_as_text(self) -> list[Piece]:
        """Return the current call as plain text, and restart the parser."""
        self._parser = self._new("")
        text, self._call = self._call, ""
        return [text] if text else []


# Exceptions for text that is not a valid call.
_NO_CALL = (ValueError, RuntimeError, KeyError, TypeError)


class CallParser:
    """Parse an answer that is only a call: a JSON object with a name and arguments."""

    def __init__(self) -> None:
        self._text = ""

    def begin(self) -> list[Piece]:
        return []

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        try:
            call, _ = json.JSONDecoder().raw_decode(self._text)  # the text of the end token may follow
        except ValueError:
            return [self._text] if self._text else []  # incomplete
        return [ToolCall(call["name"], json.dumps(call["arguments"]))]
