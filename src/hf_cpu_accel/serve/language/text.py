"""From tokens to text while they come: whole characters, up to a stop string, split into what is said, thought and called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ToolCall

from hf_cpu_accel.serve.language.parser import Parser, Piece

# Of the prompt: whether the first token begins a word, and so has a space before it, is told by what stands before it.
_CONTEXT = 8


@dataclass(frozen=True)
class Prompt:
    """Token ids; whether a chat template made them, and of which tools."""

    ids: list[int]
    tools: list[dict[str, Any]] | None = None
    is_chat: bool = False


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: of who generates it.
        ends: tokens that end it and are no text.
        prompt: what it follows.
        stop: ends the answer where one of them begins.
        parser: tells thoughts and calls of tools apart; None: all is text.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int],
        prompt: Prompt,
        stop: Sequence[str] = (),
        parser: Parser | None = None,
    ) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._ends = ends if parser is None else frozenset()  # the parser goes by their texts
        self._decoder = DecodeStream(prompt.ids[-_CONTEXT:], skip_special_tokens=parser is None)
        self._stop = StopStrings(stop)
        self._parser = parser
        self.tokens = 0
        self.has_tool_calls = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stop.found

    def begin(self) -> list[Piece]:
        """What is known before the first token: the template may have opened a thought."""
        return [] if self._parser is None else self._noted(self._parser.begin())

    def feed(self, token: int) -> list[Piece]:
        """What this token completes."""
        self.tokens += 1
        if token in self._ends or self._stop.found:
            return []
        return self._parsed(self._stop.feed(self._decoder.step(self._tokenizer, token) or ""))

    def finish(self) -> list[Piece]:
        """What was held back, because it could have become a stop string or a call."""
        pieces = self._parsed(self._stop.finish())
        return pieces if self._parser is None else pieces + self._noted(self._parser.finish())

    def _parsed(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [text] if self._parser is None else self._noted(self._parser.feed(text))

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self.has_tool_calls |= any(isinstance(piece, ToolCall) for piece in pieces)
        return pieces


class StopStrings:
    """Hands text on, up to the first of these strings, none of which is ever handed on in part."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What of the text so far can be handed on."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of `text` could begin `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
