"""What clients may do to an engine: leave, ask for too much, fail, come all at once."""

import atexit
import threading
import time

import pytest
import torch

from hf_cpu_accel.serve.engine import Busy, Engine, Stopping
from tests.generate.decoders import END, accelerated
from tests.serve.engine.cases import alone, text


class Held:
    """A processor that waits until it is let go, to keep an engine in a step."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, ids, scores):
        self.reached.set()
        assert self.go.wait(60)
        return scores


def fails(ids, scores):
    raise RuntimeError("the processor of one client")


def wait_until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def test_cancelled_requests_free_their_row():
    model, ids = accelerated("llama"), text(9)
    with Engine(model, rows=2, max_length=500) as engine:
        leaving = engine.submit(ids, max_new_tokens=480)
        stays = engine.submit(ids, max_new_tokens=30, eos_token_id=END)
        next(iter(leaving))
        leaving.cancel()
        assert len(list(leaving)) < 480
        assert leaving.finish_reason == "cancelled"
        assert stays.result() == alone(model, ids, 30)
        wait_until(lambda: engine.metrics.running == 0)
        assert (engine.metrics.cancelled, engine.metrics.completed) == (1, 1)


def test_waiting_requests_can_be_cancelled():
    held = Held()
    with Engine(accelerated("llama"), rows=1, waiting=1) as engine:
        first = engine.submit(text(3), max_new_tokens=5, logits_processor=[held])
        assert held.reached.wait(60)
        second = engine.submit(text(3), max_new_tokens=5)
        second.cancel()
        third = engine.submit(text(3), max_new_tokens=5)  # takes the place of the second
        held.go.set()
        assert second.result() == []
        assert second.finish_reason == "cancelled"
        assert len(first.result()) == len(third.result()) == 5


def test_full_queues_raise_busy():
    held = Held()
    with Engine(accelerated("llama"), rows=1, waiting=2) as engine:
        answers = [engine.submit(text(3), max_new_tokens=5, logits_processor=[held])]
        assert held.reached.wait(60)
        answers += [engine.submit(text(3), max_new_tokens=5) for _ in range(2)]
        assert (engine.metrics.waiting, engine.metrics.requests) == (2, 3)
        with pytest.raises(Busy, match="2 requests"):
            engine.submit(text(3), max_new_tokens=5)
        held.go.set()
        assert [len(answer.result()) for answer in answers] == [5, 5, 5]


@pytest.mark.parametrize("at", [1, 4])
def test_errors_affect_only_their_request(at):
    model, ids, calls = accelerated("llama"), text(9), []

    def later(ids, scores):
        calls.append(ids)
        return fails(ids, scores) if len(calls) == at else scores

    with Engine(model, rows=3) as engine:
        before = engine.submit(ids, max_new_tokens=15, eos_token_id=END)
        failing = engine.submit(ids, max_new_tokens=15, logits_processor=[later])
        after = engine.submit(ids, max_new_tokens=15, eos_token_id=END)
        with pytest.raises(RuntimeError, match="of one client"):
            failing.result()
        seen = []
        with pytest.raises(RuntimeError, match="of one client"):
            seen.extend(failing)
        assert failing.finish_reason is None
        assert before.result() == after.result() == alone(model, ids, 15)
        assert engine.metrics.failed == 1


def test_the_engine_continues_after_a_failed_step(monkeypatch):
    model, ids = accelerated("llama"), text(9)
    with Engine(model, rows=2) as engine:
        step = engine._scheduler._batch.step
        monkeypatch.setattr(engine._scheduler._batch, "step", lambda *_: step(1 / 0))
        answers = [engine.submit(ids, max_new_tokens=5) for _ in range(2)]
        for answer in answers[:1]:
            with pytest.raises(ZeroDivisionError):
                answer.result()
        wait_until(lambda: answers[1].done)
        assert engine.submit(ids, max_new_tokens=5, eos_token_id=END).result() == alone(model, ids, 5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(monkeypatch):
    held = Held()
    engine = Engine(accelerated("llama"), rows=1)
    running = engine.submit(text(3), max_new_tokens=5, logits_processor=[held])
    assert held.reached.wait(60)
    waiting = engine.submit(text(3), max_new_tokens=5)
    monkeypatch.setattr(engine._scheduler, "_decode", lambda: 1 / 0)
    held.go.set()
    for generation in (running, waiting):
        with pytest.raises(ZeroDivisionError):
            generation.result(timeout=60)
    with pytest.raises(Stopping, match="closed"):
        engine.submit(text(3), max_new_tokens=5)
    engine.close()


def test_close_finishes_all_requests_and_rejects_new_ones():
    model, ids = accelerated("llama"), text(9)
    engine = Engine(model, rows=1)
    answers = [engine.submit(ids, max_new_tokens=20, eos_token_id=END) for _ in range(3)]
    engine.close()
    assert all(answer.done for answer in answers)
    assert [answer.result() for answer in answers] == 3 * [alone(model, ids, 20)]
    with pytest.raises(Stopping, match="closed"):
        engine.submit(ids, max_new_tokens=5)


def test_close_waits_at_most_its_timeout():
    engine = Engine(accelerated("llama"), rows=1, max_length=500)
    answers = [engine.submit(text(9), max_new_tokens=490) for _ in range(4)]
    engine.close(timeout=0.05)
    assert all(answer.done for answer in answers)
    assert answers[-1].finish_reason == "cancelled"


def test_the_end_of_the_program_does_not_wait_for_answers(monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda call, **given: at_exit.append((call, given)))
    engine = Engine(accelerated("llama"), max_length=500)
    answer = engine.submit(text(9), max_new_tokens=490)
    ((close, given),) = at_exit
    close(**given)
    assert answer.finish_reason == "cancelled"
    assert not engine._thread.is_alive()


def test_result_raises_timeout_error():
    held = Held()
    with Engine(accelerated("llama")) as engine:
        answer = engine.submit(text(3), max_new_tokens=5, logits_processor=[held])
        with pytest.raises(TimeoutError, match="0 of 5 tokens"):
            answer.result(timeout=0.01)
        held.go.set()
        assert len(answer.result(timeout=60)) == 5


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {}, "input_ids is empty"),
        ([3, 260], {}, "input_ids contains 260: expected whole numbers from 0 to 259"),
        ([-1], {}, "input_ids contains -1"),
        ([1.5], {}, "input_ids contains 1.5"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1"),
        ([3], {"max_new_tokens": "7"}, "max_new_tokens='7'"),
        ([3], {"seed": -1}, "seed=-1: expected a whole number from 0"),
        (
            [3] * 300,
            {"max_new_tokens": 213},
            "300 tokens and max_new_tokens=213: expected at most 512 together",
        ),
    ],
)
def test_wrong_requests_are_rejected(ids, settings, message):
    with Engine(accelerated("llama")) as engine:
        with pytest.raises(ValueError, match=message):
            engine.submit(ids, **{"max_new_tokens": 5, **settings})
        assert engine.metrics.requests == 0


def test_the_engine_uses_the_threads_of_the_model():
    counts = []

    def count(ids, scores):
        counts.append(torch.get_num_threads())
        return scores

    with Engine(accelerated("llama")) as engine:
        engine.submit([3], max_new_tokens=1, logits_processor=[count]).result()
    assert counts == [torch.get_num_threads()]
