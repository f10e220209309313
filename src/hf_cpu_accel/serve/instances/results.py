"""What `InstancePool.map` gives: results in the order of the items, of which only so many are on their way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from itertools import islice
from typing import Any

from tqdm.auto import tqdm

from hf_cpu_accel.serve.instances.work import Failed, Many, One, Request


class Results(Iterator[Any]):
    """An iterator. `next()` raises what an item failed with, and the `next()` after it goes on with the following item.

    Leaving it early (`close()`, or it is not referred to any more) takes back what no instance has begun.
    """

    def __init__(
        self,
        items: Iterable[Any],
        *,
        submit: Callable[[Request], Future[Any]],
        one: Callable[[Any], One],
        batch_size: int | None,
        ahead: int,
        return_exceptions: bool,
        progress: bool,
    ) -> None:
        """`ahead`: how many calls are on their way at most, those that wait to be read among them."""
        self._items, self._submit, self._one = iter(items), submit, one
        self._batch_size, self._ahead, self._return_exceptions = batch_size, ahead, return_exceptions
        self._sent: deque[tuple[Future[Any], int]] = deque()
        self._done: deque[Any] = deque()
        self._end: BaseException | None = None
        total = len(items) if isinstance(items, Sized) else None
        self._bar = tqdm(total=total, unit="item", disable=not progress)

    def __next__(self) -> Any:
        if not self._done:
            self._send()
            if not self._sent:
                end, self._end = self._end or StopIteration(), None
                self.close()
                raise end
            self._receive()
        self._bar.update()
        result = self._done.popleft()
        if isinstance(result, Failed):
            if not self._return_exceptions:
                raise result.error
            return result.error
        return result

    def close(self) -> None:
        """Take back what waits."""
        self._bar.close()
        if self._end is None:
            self._end = StopIteration()
        while self._sent:
            self._sent.popleft()[0].cancel()
        self._done.clear()

    def __del__(self) -> None:
        if hasattr(self, "_bar"):
            self.close()

    def _send(self) -> None:
        """An exception of the iterable itself is raised behind the results of what came before it."""
        while self._end is None and len(self._sent) < self._ahead:
            try:
                request, count = self._draw()
                self._sent.append((self._submit(request), count))
            except Exception as error:  # StopIteration, too
                self._end = error

    def _draw(self) -> tuple[Request, int]:
        if self._batch_size is None:
            return self._one(next(self._items)), 1
        batch = list(islice(self._items, self._batch_size))
        if not batch:
            raise StopIteration
        return Many(batch), len(batch)

    def _receive(self) -> None:
        future, count = self._sent[0]
        try:
            result = future.result()
        except Exception as error:
            self._done.extend([Failed(error)] * count)
        else:
            self._done.extend([result] if self._batch_size is None else result)
        self._sent.popleft()
