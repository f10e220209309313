"""`InstancePool` of threads: order, exceptions, back-pressure, limits that change."""

import gc
import itertools
import os
import threading
import time
import weakref

import pytest
import torch

from hf_cpu_accel.serve.instances import InstancePool, placement
from hf_cpu_accel.serve.instances.placement import Limits


def request(number, batch=1):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(4, 100, (batch, 5 + number % 7), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def refuse_odd(model, item):
    """What `model` gives; odd numbers are errors, in a batch for all of it."""
    for number in item if isinstance(item, list) else [item]:
        if number % 2:
            raise ValueError(f"{number} is odd")
    return [model(number) for number in item] if isinstance(item, list) else model(item)


def tenfold(item):
    return [tenfold(number) for number in item] if isinstance(item, list) else 10 * item


@pytest.fixture
def pool():
    with InstancePool(tenfold, 2, 1) as made:
        yield made


def test_results_equal_those_of_the_model_alone(encoder):
    requests = [request(number) for number in range(20)]
    with torch.inference_mode():
        expected = [encoder(**each).last_hidden_state for each in requests]
    with InstancePool(encoder, 2, 1) as pool:
        assert pool.kind == "thread"
        answers = [output.last_hidden_state for output in pool.map(requests)]
        futures = [pool.submit(**each) for each in requests]
        again = [future.result().last_hidden_state for future in futures]
    for one, two, truth in zip(answers, again, expected, strict=True):
        torch.testing.assert_close(one, truth)
        torch.testing.assert_close(two, truth)


def test_rows_of_a_batch_belong_to_their_items(encoder):
    items = [{name: tensor[0] for name, tensor in request(7 * number).items()} for number in range(5)]
    with torch.inference_mode():
        expected = [encoder(**{name: each[name][None] for name in each})[0][0] for each in items]
    with InstancePool(encoder, 2, 1) as pool:
        outputs = list(pool.map(items, batch_size=2))
    assert [type(output).__name__ for output in outputs] == [
        "BaseModelOutputWithPoolingAndCrossAttentions"
    ] * 5
    for output, truth in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.last_hidden_state, truth)


def test_ragged_batches_run_item_by_item(encoder):
    items = [{name: tensor[0] for name, tensor in request(number).items()} for number in range(4)]
    with InstancePool(encoder, 2, 1) as pool:
        outputs = list(pool.map(items, batch_size=4))
    assert [len(output.last_hidden_state) for output in outputs] == [5, 6, 7, 8]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_results_have_the_order_of_the_items(batch_size):
    def slow_first(model, item):
        time.sleep(0.02 if item in (0, [0], [0, 1, 2]) else 0)
        return item

    with InstancePool(None, 2, 1, call=slow_first) as pool:
        assert list(pool.map(range(20), batch_size)) == list(range(20))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_an_exception_stays_with_its_item(batch_size):
    with InstancePool(lambda number: number, 2, 1, call=refuse_odd) as pool:
        given = list(pool.map(range(10), batch_size, return_exceptions=True))
        assert given[::2] == [0, 2, 4, 6, 8]
        assert [str(error) for error in given[1::2]] == [f"{number} is odd" for number in (1, 3, 5, 7, 9)]
        results = pool.map(range(4), batch_size)
        assert next(results) == 0
        with pytest.raises(ValueError, match="1 is odd"):
            next(results)
        assert next(results) == 2
        with pytest.raises(ValueError, match="3 is odd"):
            next(results)
        with pytest.raises(StopIteration):
            next(results)


def test_exceptions_of_the_iterable_follow_its_results(pool):
    def items():
        yield from (1, 2)
        raise OSError("the disk is gone")

    results = pool.map(items())
    assert [next(results), next(results)] == [10, 20]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert list(results) == []


def test_endless_iterables_are_read_on_demand(pool):
    drawn = itertools.count()
    results = pool.map(drawn, batch_size=2)
    assert [next(results) for _ in range(50)] == [10 * number for number in range(50)]
    time.sleep(0.05)
    assert next(drawn) <= 50 + 2 * 4 * 2  # calls on their way, of two items each


def test_closing_early_cancels_waiting_calls():
    calls, gate = [], threading.Event()

    def wait(model, item):
        calls.append(item)
        assert item < 1 or gate.wait(10)
        return item

    with InstancePool(None, 1, 1, call=wait) as pool:
        results = pool.map(range(100))
        assert next(results) == 0
        results.close()
        gate.set()
        pool.submit(-1).result()
    assert calls in ([0, 1, -1], [0, -1])


def test_submit_waits_while_the_queue_is_full():
    gate, sent = threading.Event(), []
    with InstancePool(None, 1, 1, call=lambda model, item: gate.wait(10), waiting=2) as pool:

        def send():
            for number in range(6):
                sent.append(pool.submit(number))

        sender = threading.Thread(target=send)
        sender.start()
        sender.join(0.3)
        assert sender.is_alive()
        assert len(sent) == 3  # one is being computed, two wait
        gate.set()
        sender.join(10)
        assert all(future.result() for future in sent)


def test_instances_are_pinned_and_threads_of_others_are_not_touched():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(3)
    seen, elsewhere = set(), []

    def look(model, item):
        time.sleep(0.01)
        seen.add((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))

    with InstancePool(None, len(cpus), 1, call=look) as pool:
        list(pool.map(range(30)))
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert "1 thread" in pool.placement.reason
    assert seen == {(frozenset({cpu}), 1) for cpu in cpus}
    assert (torch.get_num_threads(), elsewhere) == (3, [3])
    assert os.sched_getaffinity(0) >= set(cpus)


def test_changing_quotas_are_followed(monkeypatch):
    cpus = frozenset(os.sched_getaffinity(0))
    now = {"limits": Limits(cpus, None)}
    monkeypatch.setattr(placement, "limits", lambda: now["limits"])
    running, most, lock = [0], [0], threading.Lock()

    def count(model, item):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1

    with InstancePool(None, 2, 1, call=count) as pool:

        def at_a_time(quota):
            now["limits"] = Limits(cpus, quota)
            pool._follow(placement.limits())
            list(pool.map(range(4)))  # what ran before has ended
            most[0] = 0
            list(pool.map(range(20)))
            return most[0]

        assert at_a_time(1.0) == 1
        assert "1 of 2 instances compute at the same time" in pool.placement.reason
        if len(cpus) > 1:
            assert at_a_time(None) == 2


def test_pools_check_their_limits(monkeypatch, pool):
    monkeypatch.setattr(placement, "limits", lambda: Limits(frozenset({0}), 1.0))
    until = time.monotonic() + 20
    while pool.placement.active > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert [set(place.cpus) for place in pool.placement.places] == [{0}, {0}]


def test_closed_pools_reject_calls_after_finishing_all(pool):
    futures = [pool.submit(number) for number in range(8)]
    pool.close()
    assert [future.result(0) for future in futures] == [10 * number for number in range(8)]
    for ask in (lambda: pool.submit(1), lambda: pool.map([1])):
        with pytest.raises(RuntimeError, match="closed"):
            ask()
    pool.close()


def test_pools_end_when_they_are_garbage():
    before = set(threading.enumerate())
    pool = InstancePool(lambda number: number, 2, 1)
    gone, threads = weakref.ref(pool), set(threading.enumerate()) - before
    assert len(threads) == 3
    del pool
    gc.collect()
    for thread in threads:
        thread.join(20)
    assert gone() is None
    assert not any(thread.is_alive() for thread in threads)


def test_progress_counts_items(pool, capsys):
    list(pool.map(range(6), batch_size=None, progress=True))
    assert "6/6" in capsys.readouterr().err


def test_tokenizers_start_no_threads(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with InstancePool(lambda number: number, 1) as pool:
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        assert {"instances", "instance 0", "allocator", "huge pages"} <= {row.name for row in pool.settings()}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": 3}, TypeError, "model is a int"),
        ({"kind": "fibre"}, ValueError, "kind='fibre'"),
        ({"waiting": 0}, ValueError, "waiting=0"),
        ({"instances": 0}, ValueError, "instances=0"),
        ({"threads": "two"}, TypeError, "threads='two'"),
    ],
)
def test_wrong_arguments(options, error, words):
    with pytest.raises(error, match=words):
        InstancePool(**{"model": len, **options})


def test_wrong_arguments_of_map(pool):
    with pytest.raises(ValueError, match="batch_size=0"):
        pool.map([1], 0)
    with pytest.raises(TypeError, match="iterable"):
        pool.map(3)
    with InstancePool(lambda items: [], 1) as silent:
        errors = list(silent.map([1, 2], 2, return_exceptions=True))
    assert [str(error).partition(":")[0] for error in errors] == ["1 items returned 0"] * 2
