"""The iterator of `InstancePool.map`: results in the order of the items, with a limited number of calls ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from itertools import islice
from typing import Any

from tqdm.auto import tqdm

from hf_cpu_accel.serve.instances.work import Failed, Many, One, Request


class Results(Iterator[Any]):
    """An iterator of results. `next()` raises the exception of a failed item; the following `next()` continues with the next item.

    `close()` and garbage collection cancel the calls that have not started.
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
        """
        Args:
            items: the items.
            submit: submits a request.
            one: returns the request of a single item.
            batch_size: number of items per call; None for single items.
            ahead: maximum number of calls whose results are not consumed yet.
            return_exceptions: yield exceptions instead of raising them.
            progress: show a progress bar.
        """
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
        """Cancel the waiting calls."""
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
        """Submit calls. An exception of the iterable is raised after the results of the items before it."""
        while self._end is None and len(self._sent) < self._ahead:
            try:
                request, count = self._next_request()
                self._sent.append((self._submit(request), count))
            except Exception as error:  # also StopIteration
                self._end = error

    def _next_request(self) -> tuple[Request, int]:
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
