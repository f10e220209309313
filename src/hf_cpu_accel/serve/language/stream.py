"""Stream the pieces of an answer in an event loop while the engine generates them in its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_cpu_accel.serve.engine import Generation
from hf_cpu_accel.serve.language.parser import Piece
from hf_cpu_accel.serve.language.text import TextStream

_END = object()


class Streams:
    """Wait for the tokens of answers, each in its own thread.

    Args:
        most: maximum number of answers, including those that wait for the engine.
        on_first: called with the seconds to the first token of each answer.
    """

    def __init__(self, most: int, on_first: Callable[[float], object] | None = None) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tokens")
        self._on_first = on_first

    async def pieces(self, generation: Generation, text: TextStream) -> AsyncIterator[Piece]:
        """Yield the pieces of `text` as they are generated. Closing the iterator, also by an error, cancels the generation.

        Raises:
            BaseException: the error of the generation.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        start = time.monotonic()

        def put(item: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def read() -> None:
            try:
                for piece in text.begin():
                    put(piece)
                for token in generation:
                    if text.tokens == 0 and self._on_first is not None:
                        self._on_first(time.monotonic() - start)
                    for piece in text.feed(token):
                        put(piece)
                    if text.is_stopped:
                        generation.cancel()
                        break
                for piece in text.finish():
                    put(piece)
                put(_END)
            except BaseException as error:
                put(error)

        try:
            self._threads.submit(read)
            while (item := await queue.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            generation.cancel()

    def close(self) -> None:
        """Accept no more answers; the threads end after the current ones."""
        self._threads.shutdown(wait=False)


def finish_reason(generation: Generation, text: TextStream) -> str:
    """Return the finish reason of the OpenAI API."""
    if text.has_tool_calls:
        return "tool_calls"
    return "length" if generation.finish_reason == "length" and not text.is_stopped else "stop"
