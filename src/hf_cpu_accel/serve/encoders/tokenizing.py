"""Tokenize texts, from several threads at once; long texts are rejected or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer

from hf_cpu_accel.serve.limits import BadInput, TooLong

Direction = Literal["left", "right"]
# One text, a pair of texts, or token ids from the client.
Text = str | tuple[str, str] | list[int]

_CHARACTERS_PER_TOKEN = (
    250  # longer texts are rejected or cut before tokenizing, as in text-embeddings-inference
)


@dataclass(frozen=True)
class Encoded:
    """The token ids of one text or pair with special tokens, and the token type ids."""

    ids: list[int]
    type_ids: list[int]


class TextTokenizer:
    """A transformers tokenizer with a maximum length.

    It has a copy of the Rust tokenizer for each truncation side, because transformers changes the truncation of a shared tokenizer,
    which is not thread-safe.

    Args:
        tokenizer: a fast tokenizer of transformers.
        max_length: maximum number of tokens of a text.

    Raises:
        ValueError: a tokenizer in Python, without the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer in Python, which the server does not support; save a fast "
                "tokenizer (tokenizer.json) with the model"
            )
        self.max_length = max_length
        self.vocabulary = len(tokenizer)
        self.pad_id = tokenizer.pad_token_id or 0
        self.pads_left = tokenizer.padding_side == "left"
        self.has_type_ids = "token_type_ids" in tokenizer.model_input_names
        self._untruncated = _copy(backend)
        self._truncating: dict[Direction, Tokenizer] = {"left": _copy(backend), "right": _copy(backend)}
        for direction, truncating in self._truncating.items():
            truncating.enable_truncation(max_length, direction=direction)

    def encode(
        self, texts: Sequence[Text], *, truncate: bool = False, direction: Direction = "right"
    ) -> list[Encoded]:
        """Tokenize texts, pairs and token ids.

        Args:
            texts: the inputs.
            truncate: cut long inputs to `max_length` tokens.
            direction: side at which inputs are cut.

        Raises:
            TooLong: an input has more than `max_length` tokens, and `truncate` is False.
            BadInput: an input is empty, or a token id is not in the vocabulary.
        """
        strings = [self._cut_text(text, truncate, direction) for text in texts if not isinstance(text, list)]
        tokenizer = self._truncating[direction] if truncate else self._untruncated
        encodings = iter(tokenizer.encode_batch_fast(strings))
        return [
            self._from_ids(text, truncate, direction)
            if isinstance(text, list)
            else self._from_encoding(next(encodings))
            for text in texts
        ]

    def _cut_text(self, text: Any, truncate: bool, direction: Direction) -> Any:
        """Cut a text or a pair to the maximum number of characters."""
        if isinstance(text, tuple):
            return tuple(self._cut_text(part, truncate, direction) for part in text)
        if not text:
            raise BadInput("inputs cannot be empty; pass texts with at least one character")
        most = self.max_length * _CHARACTERS_PER_TOKEN
        if len(text) <= most:
            return text
        if not truncate:
            raise TooLong(
                f"inputs must have at most {most} characters, given: {len(text)}; shorten it or set truncate"
            )
        return text[:most] if direction == "right" else text[-most:]

    def _from_encoding(self, encoding: Encoding) -> Encoded:
        self._check_length(len(encoding.ids))
        return Encoded(encoding.ids, encoding.type_ids)

    def _from_ids(self, ids: list[int], truncate: bool, direction: Direction) -> Encoded:
        if not ids:
            raise BadInput("inputs cannot be empty; pass at least one token id")
        if (wrong := next((token for token in ids if not 0 <= token < self.vocabulary), None)) is not None:
            raise BadInput(f"inputs contains the token id {wrong}; accepted are 0 to {self.vocabulary - 1}")
        if truncate:
            ids = ids[: self.max_length] if direction == "right" else ids[-self.max_length :]
        self._check_length(len(ids))
        return Encoded(ids, [0] * len(ids))

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise TooLong(
                f"inputs must have at most {self.max_length} tokens, given: {tokens}; shorten it or set truncate"
            )


def _copy(tokenizer: Tokenizer) -> Tokenizer:
    copied: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    copied.no_padding()
    copied.no_truncation()
    return copied
