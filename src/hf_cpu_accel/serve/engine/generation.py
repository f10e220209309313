"""A request to an engine, and the handle of the client, which yields the tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments of a request; see `Engine.submit`.

    Attributes:
        input_ids: the prompt.
        max_new_tokens: maximum number of new tokens.
        ends: the tokens that end a sequence.
        logits_processor: None or a `LogitsProcessorList` for this request only.
        do_sample: True to sample tokens.
        seed: seed for sampling, or None.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    logits_processor: Any = None
    do_sample: bool = False
    seed: int | None = None


class Generation:
    """The tokens of one request. Iterating waits for tokens; each of several iterating threads gets all tokens.

    Attributes:
        request: the arguments of the request.
        prompt_tokens: number of tokens of the prompt.
        cached_tokens: number of these tokens from the prefix cache, known with the first new token.
        finish_reason: "stop" after an end token, which is the last token; "length" after max_new_tokens; "cancelled"; None while
            the request runs, and after an error, which iterating raises.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.prompt_tokens = len(request.input_ids)
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokens: list[int] = []
        self._error: BaseException | None = None
        self._cancelled = False
        self._done = False
        self._changed = threading.Condition()

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens of the prompt and the new ones."""
        return self.prompt_tokens + self.request.max_new_tokens

    def __iter__(self) -> Iterator[int]:
        """Yield the new tokens as they are computed.

        Raises:
            BaseException: the error of this request in the engine.
        """
        position = 0
        while tokens := self._after(position):
            yield from tokens
            position += len(tokens)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Cancel the request at the next step of the engine; the tokens so far stay readable."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Return whether `cancel` was called, also after the end."""
        return self._cancelled

    @property
    def done(self) -> bool:
        """Return whether the request has ended."""
        return self._done

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for the end of the request and return all new tokens.

        Args:
            timeout: maximum time in seconds; None for no limit.

        Raises:
            TimeoutError: the request runs longer than `timeout`.
            BaseException: the error of this request in the engine.
        """
        start = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(
                    f"timeout={timeout}: {len(self._tokens)} of {self.request.max_new_tokens} tokens after "
                    f"{time.monotonic() - start:.1f} s; pass a longer timeout, or call cancel()"
                )
            if self._error is not None:
                raise self._error
            return list(self._tokens)

    def _after(self, position: int) -> list[int]:
        """Wait for tokens from `position` on and return them; an empty list at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or len(self._tokens) > position)
            return self._tokens[position:]

    def put(self, token: int) -> None:
        """Append a token; called by the engine."""
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()

    def finish(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """End the request because of `reason` or `error`; called by the engine."""
        with self._changed:
            self.finish_reason, self._error, self._done = reason, error, True
            self._changed.notify_all()
