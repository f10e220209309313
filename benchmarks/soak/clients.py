"""Threads that call one model concurrently and check each output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.soak.served import Served

_MOST_REPORTED = 20


class Clients:
    """Threads, with one intra-op thread each, that call `model` repeatedly.

    Attributes:
        answered: how many answers there were.
        failures: what was wrong with some of them, a line each.
    """

    def __init__(self, served: Served, model: Any, answers: Sequence[Tensor], threads: int) -> None:
        self.answered, self.failures = 0, list[str]()
        self._served, self._model, self._answers = served, model, answers
        self._numbers, self._lock = count(), threading.Lock()
        self._start = threading.Barrier(threads)
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def ask(self, goes_on: Callable[[int], bool]) -> Clients:
        """Call while `goes_on(number)` is true for the number of the call."""
        self._goes_on = goes_on
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        return self

    def _ask(self) -> None:
        torch.set_num_threads(1)
        self._start.wait()
        while self._goes_on(number := next(self._numbers)):
            problem = self._problem(number % len(self._answers))
            with self._lock:
                self.answered += 1
                if problem is not None and len(self.failures) < _MOST_REPORTED:
                    self.failures.append(f"request {number}: {problem}")

    def _problem(self, number: int) -> str | None:
        expected = self._answers[number]
        try:
            answer = self._served.answer(self._model, number)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if answer.shape != expected.shape:
            return f"of shape {tuple(answer.shape)} instead of {tuple(expected.shape)}"
        if self._served.agrees(answer, expected):
            return None
        return f"off by {(answer - expected).abs().max():.2e}"
