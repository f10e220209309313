"""What of an answer is said, thought or called: by transformers' parser, or where the answer has to be a call."""

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
    """Reads the text of an answer as it comes."""

    def begin(self) -> list[Piece]:
        """What the chat template has begun the answer with."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """What this text completes."""
        ...

    def finish(self) -> list[Piece]:
        """What ends with the answer."""
        ...


def parser(
    model: Any, tokenizer: Any, prompt: list[int], tools: list[dict[str, Any]] | None
) -> Parser | None:
    """None where it is not known how the model marks its thoughts and calls.

    Args:
        prompt: as the chat template has made it, with `tools`.
    """
    found = get_response_template(tokenizer, model)
    if found is None:
        return None
    template = load_response_template(found)
    return MarkParser(template, begun(template, tokenizer.decode(prompt)), tools or [])


def begun(template: ResponseTemplate, prompt: str) -> str:
    """What the chat template has written of the answer, with which the prompt ends.

    It begins behind the last anchor, which says whose turn it is. A chat template that is not the model type's own may have none:
    then only a mark at the very end, as one that opens a thought, belongs to the answer.
    """
    anchors = [match.end() for match in template.start_anchor_re.finditer(prompt)]
    if anchors:
        return prompt[anchors[-1] :]
    marks = (field.open_re for field in template.fields.values() if field.open_re is not None)
    places = [match for mark in marks for match in mark.finditer(prompt) if not prompt[match.end() :].strip()]
    return prompt[places[-1].start() :] if places else ""


class MarkParser:
    """By marks in the text. What stands between the marks of a call and is none is text."""

    def __init__(self, template: ResponseTemplate, prefix: str, tools: list[dict[str, Any]]) -> None:
        self._template, self._tools = template, tools
        self._parser = self._new(prefix)
        self._call = ""  # of the one that is being read, what has come

    def begin(self) -> list[Piece]:
        return self._pieces(self._parser.initial_events)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for character in text:  # one by one, so that what came before an error is known
            try:
                pieces += self._pieces(self._parser.feed(character))
            except _NO_CALL:
                pieces += self._given_up()
        return pieces

    def finish(self) -> list[Piece]:
        try:
            _, events = self._parser.finalize()
            return self._pieces(events)
        except _NO_CALL:
            return self._given_up()

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

    def _given_up(self) -> list[Piece]:
        self._parser = self._new("")
        text, self._call = self._call, ""
        return [text] if text else []


# What parsing and reading a call raise where it is not as it should be.
_NO_CALL = (ValueError, RuntimeError, KeyError, TypeError)


class CallParser:
    """Of an answer that is nothing but a call: an object with its name and arguments, in JSON."""

    def __init__(self) -> None:
        self._text = ""

    def begin(self) -> list[Piece]:
        return []

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        try:
            call, _ = json.JSONDecoder().raw_decode(self._text)  # the end token's text may stand behind it
        except ValueError:
            return [self._text] if self._text else []  # it broke off
        return [ToolCall(call["name"], json.dumps(call["arguments"]))]
