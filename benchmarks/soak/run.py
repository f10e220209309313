"""Rounds of two models under four threads, each round with other dtypes, accelerated before and restored after it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.soak.clients import Clients
from benchmarks.soak.memory import Held, growth
from benchmarks.soak.served import SERVED, Served
from hf_cpu_accel import accelerate_for_cpu, restore

DTYPES = ("float32", "bfloat16", "int8")
_REQUESTS = 24  # different ones for each model
_THREADS = 2  # for each of two models


@dataclass
class Report:
    """Attributes:
    answered: how many answers were checked.
    failures: what was wrong.
    held: the process after each round.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def growth(self) -> float:
        """Return the growth of resident memory over the rounds."""
        return growth([held.resident for held in self.held])


class Soak:
    """The models, their original states, and the outputs of each in each dtype."""

    def __init__(self, names: tuple[str, ...] = tuple(SERVED), seed: int = 0) -> None:
        self._names, self._random = names, random.Random(seed)
        self._models = {name: SERVED[name].build() for name in names}
        self._states = {name: _state(model) for name, model in self._models.items()}
        self._answers: dict[tuple[str, str], list[Tensor]] = {}

    def run(self, goes_on: Callable[[int], bool], requests: int) -> Report:
        """Run rounds while `goes_on(number)`, with `requests` for each of two models."""
        report, number = Report(), 0
        while goes_on(number):
            self._round(report, requests)
            report.held.append(Held.now())
            number += 1
        return report

    def _round(self, report: Report, requests: int) -> None:
        chosen = {name: self._random.choice(DTYPES) for name in self._random.sample(self._names, 2)}
        for name, dtype in chosen.items():
            accelerate_for_cpu(self._models[name], dtype=dtype, threads=1)
        groups = [self._clients(name, dtype) for name, dtype in chosen.items()]
        asking = [
            threading.Thread(target=group.ask, args=(lambda number: number < requests,)) for group in groups
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        for name, group in zip(chosen, groups, strict=True):
            report.answered += group.answered
            report.failures += [f"{name} {chosen[name]}: {failure}" for failure in group.failures]
            restore(self._models[name])
            report.failures += [f"{name}: {tensor} came back changed" for tensor in self._changed(name)]

    def _clients(self, name: str, dtype: str) -> Clients:
        served, model = SERVED[name], self._models[name]
        if (name, dtype) not in self._answers:
            self._answers[name, dtype] = [served.answer(model, number) for number in range(_REQUESTS)]
        return Clients(served, model, self._answers[name, dtype], _THREADS)

    def _changed(self, name: str) -> Iterator[str]:
        now = self._models[name].state_dict()
        for tensor, value in self._states[name].items():
            if tensor not in now or not torch.equal(now[tensor], value):
                yield tensor


def crowds(requests: int, threads: Sequence[int] = (4, 8)) -> Report:
    """Call each model from many concurrent clients, from its first call on, in float32 and int8 in turn."""
    report = Report()
    for served in SERVED.values():
        for number, count in enumerate(threads):
            options = {"dtype": ("float32", "int8")[number % 2], "threads": 1}
            asked = accelerate_for_cpu(served.build(), **options)
            answers = [served.answer(asked, request) for request in range(_REQUESTS)]
            clients = Clients(served, accelerate_for_cpu(served.build(), **options), answers, count)
            clients.ask(lambda request: request < requests)
            report.answered += clients.answered
            report.failures += clients.failures
            report.held.append(Held.now())
    return report


def cycles(served: Served, model: Any, times: int) -> Report:
    """Accelerate, call once, restore: `times` times, in all dtypes in turn."""
    report, state, expected = Report(), _state(model), served.answer(model, 0)
    for number in range(times):
        accelerate_for_cpu(model, dtype=DTYPES[number % len(DTYPES)], threads=1)
        served.answer(model, number % _REQUESTS)
        restore(model)
        report.answered += 1
        if number % max(10, times // 20) == 0 or number == times - 1:
            report.held.append(Held.now())
    now = model.state_dict()
    report.failures += [name for name, value in state.items() if not torch.equal(now[name], value)]
    if not torch.equal(served.answer(model, 0), expected):
        report.failures.append("another answer than before")
    return report


def until(seconds: float) -> Callable[[int], bool]:
    """Return a function that is false after this time."""
    end = time.monotonic() + seconds
    return lambda number: time.monotonic() < end


def _state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
