"""Texts to token ids, from any thread at once, with what is too long refused or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer

from hf_cpu_accel.serve.limits import BadInput, TooLong

Direction = Literal["left", "right"]
# One text, a pair of them, or ids that the client has made with this tokenizer.
Text = str | tuple[str, str] | list[int]

_CHARACTERS_PER_TOKEN = 250  # what is longer than this for each token is not tokenized to the end, as in text-embeddings-inference


@dataclass(frozen=True)
class Encoded:
    """The ids of one text with its special tokens, and which of two texts each belongs to."""

    ids: list[int]
    type_ids: list[int]


class TextTokenizer:
    """A tokenizer of transformers with a largest length.

    It has a copy of the Rust tokenizer for each way to cut: transformers sets that on the one that it has, which other threads use.

    Raises:
        ValueError: it is not one of the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} is a tokenizer in Python; the server needs one of the library tokenizers"
            )
        self.max_length = max_length
        self.vocabulary = len(tokenizer)
        self.pad_id = tokenizer.pad_token_id or 0
        self.pads_left = tokenizer.padding_side == "left"
        self.has_type_ids = "token_type_ids" in tokenizer.model_input_names
        self._whole = _copy(backend)
        self._cut: dict[Direction, Tokenizer] = {"left": _copy(backend), "right": _copy(backend)}
        for direction, cut in self._cut.items():
            cut.enable_truncation(max_length, direction=direction)

    def encode(
        self, texts: Sequence[Text], *, truncate: bool = False, direction: Direction = "right"
    ) -> list[Encoded]:
        """
        Raises:
            TooLong: a text has more than `max_length` tokens, and `truncate` is not set.
            BadInput: a text is empty, or an id is not in the vocabulary.
        """
        words = [self._shortened(text, truncate, direction) for text in texts if not isinstance(text, list)]
        tokenizer = self._cut[direction] if truncate else self._whole
        encodings = iter(tokenizer.encode_batch_fast(words))
        return [
            self._given(text, truncate, direction)
            if isinstance(text, list)
            else self._checked(next(encodings))
            for text in texts
        ]

    def _shortened(self, text: Any, truncate: bool, direction: Direction) -> Any:
        if isinstance(text, tuple):
            return tuple(self._shortened(part, truncate, direction) for part in text)
        if not text:
            raise BadInput("inputs cannot be empty")
        most = self.max_length * _CHARACTERS_PER_TOKEN
        if len(text) <= most:
            return text
        if not truncate:
            raise TooLong(f"inputs must have at most {most} characters, given: {len(text)}")
        return text[:most] if direction == "right" else text[-most:]

    def _checked(self, encoding: Encoding) -> Encoded:
        self._check_length(len(encoding.ids))
        return Encoded(encoding.ids, encoding.type_ids)

    def _given(self, ids: list[int], truncate: bool, direction: Direction) -> Encoded:
        if not ids:
            raise BadInput("inputs cannot be empty")
        if not all(0 <= token < self.vocabulary for token in ids):
            raise BadInput(f"token ids must be from 0 to {self.vocabulary - 1}")
        if truncate:
            ids = ids[: self.max_length] if direction == "right" else ids[-self.max_length :]
        self._check_length(len(ids))
        return Encoded(ids, [0] * len(ids))

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise TooLong(f"inputs must have at most {self.max_length} tokens, given: {tokens}")


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    copied: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    copied.no_padding()
    copied.no_truncation()
    return copied
