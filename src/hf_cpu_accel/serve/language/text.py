"""Convert tokens to text incrementally: complete characters, up to a stop string, split into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ToolCall

from hf_cpu_accel.serve.language.parser import Parser, Piece

# Tokens of the prompt for the decoder: they decide whether the first new token starts with a space.
_CONTEXT = 8


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, its tools, and whether a chat template created it."""

    ids: list[int]
    tools: list[dict[str, Any]] | None = None
    is_chat: bool = False


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: tokenizer of the model.
        ends: tokens that end the answer and are not part of its text.
        prompt: the prompt.
        stop: stop strings; the text ends before the first one.
        parser: splits off reasoning and tool calls; None if all is text.
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
        self._ends = ends if parser is None else frozenset()  # the parser needs the text of end tokens
        self._decoder = DecodeStream(prompt.ids[-_CONTEXT:], skip_special_tokens=parser is None)
        self._stop = StopStrings(stop)
        self._parser = parser
        self.tokens = 0
        self.has_tool_calls = False

    @property
    def is_stopped(self) -> bool:
        """Return whether the text contains a stop string."""
        return self._stop.has_matched

    def begin(self) -> list[Piece]:
        """Return the pieces before the first token; the chat template may have opened reasoning."""
        return [] if self._parser is None else self._record(self._parser.begin())

    def feed(self, token: int) -> list[Piece]:
        """Return the pieces that this token completes."""
        self.tokens += 1
        if token in self._ends or self._stop.has_matched:
            return []
        return self._parse(self._stop.feed(self._decoder.step(self._tokenizer, token) or ""))

    def finish(self) -> list[Piece]:
        """Return the text that was withheld as a possible stop string or call."""
        pieces = self._parse(self._stop.finish())
        return pieces if self._parser is None else pieces + self._record(self._parser.finish())

    def _parse(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [text] if self._parser is None else self._record(self._parser.feed(text))

    def _record(self, pieces: list[Piece]) -> list[Piece]:
        """Set `has_tool_calls` and return the pieces."""
        self.has_tool_calls |= any(isinstance(piece, ToolCall) for piece in pieces)
        return pieces


class StopStrings:
    """Pass text on, up to the first stop string; parts of a possible stop string are withheld."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._withheld = ""
        self.has_matched = False

    def feed(self, text: str) -> str:
        """Return the text that can be passed on."""
        if self.has_matched:
            return ""
        text = self._withheld + text
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.has_matched, self._withheld = True, ""
            return text[: min(places)]
        count = max((_overlap(text, string) for string in self._strings), default=0)
        self._withheld = text[len(text) - count :]
        return text[: len(text) - count]

    def finish(self) -> str:
        """Return the withheld text at the end of the answer."""
        text, self._withheld = self._withheld, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Return the number of characters at the end of `text` that could start `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
