"""A request to an engine, and what its client holds of it: the tokens as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asked for; see `Engine.submit`.

    Attributes:
        input_ids: the prompt.
        ends: the tokens that end a sequence.
        logits_processor: None or a `LogitsProcessorList` of this request alone.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    logits_processor: Any = None
    do_sample: bool = False
    seed: int | None = None


class Generation:
    """The tokens of one request. Iterating waits for them; several threads may iterate, each gets all from the first on.

    Attributes:
        request: what was asked for.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them were found in the prefix cache, known with the first token.
        finish_reason: None while it runs; "stop" after an end token, which is the last of the tokens then, "length" after
            max_new_tokens, "cancelled". None for good where it failed: iterating raises then what was raised in the engine.
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

    def __iter__(self) -> Iterator[int]:
        """The new tokens, as they come.

        Raises:
            BaseException: what this request failed with.
        """
        position = 0
        while fresh := self._after(position):
            yield from fresh
            position += len(fresh)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ask for no more tokens. The engine drops the request at its next step; what came before stays readable."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called, be it in time or not."""
        return self._cancelled

    @property
    def done(self) -> bool:
        """Whether there will be no more tokens."""
        return self._done

    def result(self, timeout: float | None = None) -> list[int]:
        """All new tokens, once there will be no more.

        Raises:
            TimeoutError: after `timeout` seconds.
            BaseException: what this request failed with.
        """
        began = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(
                    f"{len(self._tokens)} of {self.request.max_new_tokens} tokens after {time.monotonic() - began:.1f} s"
                )
            if self._error is not None:
                raise self._error
            return list(self._tokens)

    def _after(self, position: int) -> list[int]:
        """The tokens from `position` on, as soon as there is one; none if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or len(self._tokens) > position)
            return self._tokens[position:]

    def put(self, token: int) -> None:
        """The engine's: one more token."""
        with self._changed:
            self._tokens.append(token)
            self._changed.notify_all()

    def finish(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """The engine's: there will be no more, because of `reason` or of `error`."""
        with self._changed:
            self.finish_reason, self._error, self._done = reason, error, True
            self._changed.notify_all()
