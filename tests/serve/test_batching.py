"""`Batcher`: what is computed together, in which turn, and what happens to those that fail, leave, or are too many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel.serve.batching import Batcher, BatchFacts, neighbors
from hf_cpu_accel.serve.limits import Busy, Stopping, TooLong

LONG = 30.0  # seconds that nothing here takes unless it is wrong


class Recorder:
    """Doubles numbers; notes each batch, and holds the model busy until told otherwise."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = threading.Event()
        self.free.set()
        self.begun = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(list(items))
        self.begun.set()
        assert self.free.wait(LONG)
        if any(item < 0 for item in items):
            raise ArithmeticError(f"{min(items)} is negative")
        return [2 * item for item in items]

    def hold(self, batcher: Batcher[int, int]) -> None:
        """Occupy the model with an item of its own, 0, so that what comes then has to wait."""
        self.free.clear()
        self.begun.clear()
        batcher.submit([0], [1])
        assert self.begun.wait(LONG)
        self.batches.clear()


@pytest.fixture
def record() -> Recorder:
    return Recorder()


@pytest.fixture
def batcher(record: Recorder) -> Iterator[Batcher[int, int]]:
    batcher: Batcher[int, int] = Batcher(record, max_tokens=12, max_wait=0, max_waiting=20)
    yield batcher
    record.free.set()
    assert batcher.close(LONG)


def answers(futures: Sequence[object]) -> list[int]:
    return [future.result(LONG) for future in futures]  # type: ignore[attr-defined]


def test_waiting_items_are_batched_by_similar_length(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    futures = batcher.submit([1, 2, 3, 4, 5], [2, 9, 3, 4, 2])
    assert batcher.waiting == 5
    record.free.set()
    assert answers(futures) == [2, 4, 6, 8, 10]
    # 1, whose turn it is, with those nearest in length while three rows of the longest are at most 12 tokens; then 2 alone.
    assert [sorted(batch) for batch in record.batches] == [[1, 3, 5], [4], [2]] or [
        sorted(batch) for batch in record.batches
    ] == [[1, 3, 5], [2], [4]]


def test_a_long_request_does_not_keep_others_waiting(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    many = batcher.submit(list(range(1, 13)), [6] * 12)
    single = batcher.submit([99], [6])
    record.free.set()
    answers([*many, *single])
    assert any(99 in batch for batch in record.batches[:2])


def test_short_requests_do_not_keep_a_long_one_waiting(record: Recorder) -> None:
    """However long they go on: here two clients that ask again as soon as they are answered."""
    batcher: Batcher[int, int] = Batcher(record, max_tokens=6, max_wait=0)
    record.hold(batcher)
    many = batcher.submit(list(range(1, 9)), [6] * 8)
    again = threading.Event()

    def come_back(future: object) -> None:
        if not again.is_set():
            batcher.submit([99], [6])[0].add_done_callback(come_back)

    for _ in range(2):
        batcher.submit([99], [6])[0].add_done_callback(come_back)
    record.free.set()
    answers(many)
    again.set()
    assert record.batches.index([8]) < 40  # a third of them each
    assert batcher.close(LONG)


def test_nothing_waits_forever(batcher: Batcher[int, int], record: Recorder) -> None:
    """A long text among short ones, which would fit together without it for ever."""
    record.hold(batcher)
    [long] = batcher.submit([77], [12])
    short = [batcher.submit([number], [1])[0] for number in range(1, 10)]
    record.free.set()
    answers([long, *short])
    assert 77 in record.batches[0]


def test_each_item_gets_its_own_exception(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    one, bad, two = batcher.submit([1, -5, 2], [1, 1, 1])
    record.free.set()
    assert answers([one, two]) == [2, 4]
    with pytest.raises(ArithmeticError, match="-5 is negative"):
        bad.result(LONG)


def test_too_few_answers_are_an_error() -> None:
    batcher: Batcher[int, int] = Batcher(lambda items: [], max_wait=0)
    with pytest.raises(RuntimeError, match="0 answers to 1 inputs"):
        batcher.submit([1], [1])[0].result(LONG)
    assert batcher.close(LONG)


def test_cancelled_items_are_not_computed(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    one, left, two = batcher.submit([1, 2, 3], [1, 1, 1])
    assert left.cancel()
    record.free.set()
    assert answers([one, two]) == [2, 6]
    assert record.batches == [[1, 3]]


def test_a_full_queue_takes_all_or_nothing(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    futures = batcher.submit(list(range(15)), [1] * 15)
    with pytest.raises(Busy, match="15 are waiting, at most 20 may"):
        batcher.submit(list(range(6)), [1] * 6)
    with pytest.raises(TooLong, match="the request has 21 inputs; at most 20"):
        batcher.submit(list(range(21)), [1] * 21)
    assert batcher.waiting == 15
    assert all(future.cancel() for future in futures[:5])
    futures += batcher.submit([20] * 6, [1] * 6)  # in the places of those that left
    record.free.set()
    assert len(answers(futures[5:])) == 16


def test_an_idle_model_computes_at_once(record: Recorder) -> None:
    batcher: Batcher[int, int] = Batcher(record, max_wait=LONG)
    start = time.monotonic()
    for number in range(3):  # a client that asks again when it has its answer
        assert answers(batcher.submit([number], [1])) == [2 * number]
    assert time.monotonic() - start < LONG / 2
    assert batcher.close(LONG)


def test_after_a_batch_the_next_waits_for_as_many(record: Recorder) -> None:
    batcher: Batcher[int, int] = Batcher(record, max_wait=LONG)
    answers(batcher.submit([1, 2, 3], [1, 1, 1]))
    record.batches.clear()
    futures = [batcher.submit([number], [1])[0] for number in (4, 5, 6)]  # one by one, as clients come back
    assert answers(futures) == [8, 10, 12]
    assert record.batches == [[4, 5, 6]]
    assert batcher.close(LONG)


def test_batches_wait_at_most_max_wait(record: Recorder) -> None:
    batcher: Batcher[int, int] = Batcher(record, max_wait=0.05)
    answers(batcher.submit([1, 2], [1, 1]))
    assert answers(batcher.submit([3], [1])) == [6]
    assert batcher.close(LONG)


def test_close_finishes_submitted_items(batcher: Batcher[int, int], record: Recorder) -> None:
    record.hold(batcher)
    futures = batcher.submit([1, 2], [1, 1])
    assert not batcher.close(0.01)
    with pytest.raises(Stopping):
        batcher.submit([3], [1])
    record.free.set()
    assert answers(futures) == [2, 4]


def test_callbacks_get_batches_and_numbers_of_workers() -> None:
    facts: list[BatchFacts] = []
    threads: list[tuple[str, int]] = []
    batcher: Batcher[int, int] = Batcher(
        lambda items: items,
        on_batch=facts.append,
        prepare=lambda computing: threads.append((threading.current_thread().name, computing)),
        name="of the test",
    )
    answers(batcher.submit([1, 2], [3, 5]))
    assert batcher.close(LONG)
    assert [(one.rows, one.tokens, one.padded_tokens) for one in facts] == [(2, 8, 10)]
    assert facts[0].seconds >= 0
    assert threads == [("of the test", 1)]


def test_workers_share_waiting_items_and_know_their_number(record: Recorder) -> None:
    told: list[int] = []
    batcher: Batcher[int, int] = Batcher(record, workers=2, max_wait=0, prepare=told.append)
    record.hold(batcher)  # one of them
    futures = batcher.submit([1, 2, 3], [1, 1, 1])
    deadline = time.monotonic() + LONG
    while not record.batches and time.monotonic() < deadline:
        time.sleep(0.001)
    assert record.batches == [[1, 2, 3]]  # by the other one, which is all that was free
    waiting = batcher.submit([4, 5, 6, 7], [1, 1, 1, 1])
    record.free.set()
    assert answers([*futures, *waiting]) == [2, 4, 6, 8, 10, 12, 14]
    assert batcher.close(LONG)
    assert told[:3] == [1, 1, 2]  # each at its beginning, then the second one


def test_free_workers_halve_a_request() -> None:
    both = threading.Barrier(2, timeout=LONG)

    def run(items: list[int]) -> list[int]:
        both.wait()
        return [len(items)] * len(items)

    batcher: Batcher[int, int] = Batcher(run, workers=2, max_wait=0)
    assert answers(batcher.submit([1, 2, 3, 4, 5], [1] * 5)) == [3, 3, 3, 2, 2]
    assert batcher.close(LONG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"max_wait": -1}, "max_wait=-1"),
    ],
)
def test_wrong_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batcher(lambda items: items, **options)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 40), st.data()
)
def test_neighbors_are_within_the_limit_and_leave_no_room(
    sizes: list[int], limit: int, most: int, data: st.DataObject
) -> None:
    sizes.sort()
    middle = data.draw(st.integers(0, len(sizes) - 1))
    first, last = neighbors(sizes, middle, limit, most)
    assert first <= middle <= last
    rows = last - first + 1
    assert rows == 1 or rows * sizes[last] <= limit
    assert rows <= most
    if rows == most:
        return
    if first > 0:
        assert (rows + 1) * sizes[last] > limit
    if last + 1 < len(sizes):
        assert (rows + 1) * sizes[last + 1] > limit
