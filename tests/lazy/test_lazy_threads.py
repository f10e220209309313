"""Lazy tensors that many threads ask for at once: their values are made once, and everybody gets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.lazy.position_bias import PositionBias
from hf_cpu_accel.lazy.window_mask import WindowMask

THREADS = 8


class Sum(LazyTensor):
    """[size]: of two tensors, the second of which may be lazy, too. Counts how often it was made."""

    @classmethod
    def of(cls, first: Tensor, second: Tensor, failures: int = 0) -> Sum:
        lazy: Sum = cls.like(first.shape, first.dtype)
        lazy.parts, lazy.made, lazy.failures = (first, second), 0, failures
        return lazy

    def _make(self) -> Tensor:
        self.made += 1
        if self.made <= self.failures:
            raise ValueError("not now")
        first, second = self.parts
        return first + second

    def _forget(self) -> None:
        del self.parts


@pytest.fixture(autouse=True)
def _other_threads_often() -> Iterator[None]:
    """Threads take turns every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(work: Callable[[int], object]) -> list[object]:
    """What `work` gives, or raises, in all threads, which begin at the same time."""
    results: list[object] = [None] * THREADS
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except ValueError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_values_are_made_once() -> None:
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x + 0,
        lambda x: x.tensor,
        lambda x: torch.cat([x, x])[: len(x)],
        lambda x: torch.from_numpy(x.numpy()),
    )
    for _ in range(100):
        first, second = torch.randn(2, 50)
        lazy = Sum.of(first, second)
        for got in together(lambda number, lazy=lazy: ways[number % len(ways)](lazy)):
            assert torch.equal(got, first + second)
        assert lazy.made == 1


def test_chains_do_not_wait_for_each_other() -> None:
    """Each thread asks for another link of a chain first, and then for all."""
    for _ in range(50):
        links: list[Tensor] = [torch.ones(20)]
        for _ in range(THREADS):
            links.append(Sum.of(torch.ones(20), links[-1]))

        def ask(number: int, links: list[Tensor] = links) -> list[float]:
            order = links[number + 1 :] + links[: number + 1]
            return sorted(float((link * 1)[3]) for link in order)

        assert together(ask) == [list(map(float, range(1, THREADS + 2)))] * THREADS
        assert all(link.made == 1 for link in links[1:] if isinstance(link, Sum))


def test_who_asks_after_a_failure_has_it_tried_again() -> None:
    for _ in range(50):
        lazy = Sum.of(torch.ones(5), torch.ones(5), failures=3)
        results = together(lambda _, lazy=lazy: lazy * 1)
        assert sum(isinstance(result, ValueError) for result in results) == 3
        assert all(torch.equal(x, torch.full((5,), 2.0)) for x in results if isinstance(x, Tensor))


@pytest.mark.parametrize("kind", ["causal", "window", "bias"])
def test_masks_of_models(kind: str) -> None:
    padding, table = torch.ones(2, 30, dtype=torch.bool), torch.randn(4, 9)
    padding[1, :7] = False
    made = {
        "causal": lambda: CausalMask.of(2, 5, 20, 10, 8, padding),
        "window": lambda: WindowMask.of(2, 30, 4, padding),
        "bias": lambda: PositionBias.of(table, 4, 5, 20, torch.float32),
    }[kind]
    expected = made()._make()
    for _ in range(50):
        mask = made()
        starts = together(lambda _, m=mask: (m * 1, m.start if isinstance(m, CausalMask) else None))
        for values, start in starts:
            assert torch.equal(values, expected * 1)
            assert start is None or start.tolist() == [0, 7]
