import json
import multiprocessing
import os
import resource
import warnings
from pathlib import Path

import pytest
from filelock import FileLock

from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.store import Choice, Store
from tests.children import LAST_RESORT

MACHINE = {"cpu": "some", "threads": 2}
FAST, SLOW = (
    Choice("oneDNN", {NATIVE: 2e-3, "oneDNN": 1e-3}, 128),
    Choice(NATIVE, {NATIVE: 1e-3, "oneDNN": 2e-3}, 64),
)


def work(folder, worker, said):
    """What one of several processes does: answers of its own, and answers to questions that all have."""
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    store = Store(folder, MACHINE)

    def add(key, seconds):
        while True:
            given = store.add({key: Choice(NATIVE, {NATIVE: seconds}, 16)})
            if store.problem is None:  # else the others had the lock for all the time that it is waited for
                return round(given[key].seconds[NATIVE], 6)
            assert "could not be acquired" in store.problem, store.problem

    for i in range(20):
        add(f"{worker}.{i}", 1e-3)
    said.put([add(f"shared {i}", 1e-3 * (worker + 1)) for i in range(20)])


def test_what_was_added_is_there_for_others(tmp_path):
    store = Store(tmp_path / "new" / "folder", MACHINE)
    assert store.load() == {}
    assert store.add({"a": FAST}) == {"a": FAST}
    assert store.add({"b": SLOW}) == {"a": FAST, "b": SLOW}
    assert Store(store.path.parent, MACHINE).load() == {"a": FAST, "b": SLOW}
    assert Store(store.path.parent, {**MACHINE, "threads": 4}).load() == {}
    assert not list(store.path.parent.glob("*.tmp"))


def test_the_first_answer_stays(tmp_path):
    Store(tmp_path, MACHINE).add({"a": FAST})
    assert Store(tmp_path, MACHINE).add({"a": SLOW}) == {"a": FAST}
    assert Store(tmp_path, MACHINE).load() == {"a": FAST}


def test_processes_lose_nothing_and_agree(tmp_path):
    # Forked, since each would need seconds to import torch; they compute nothing.
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    workers = [context.Process(target=work, args=(tmp_path, i, said)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LAST_RESORT)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    answers = [said.get() for _ in workers]
    assert answers == [answers[0]] * 4
    assert len(Store(tmp_path, MACHINE).load()) == 4 * 20 + 20


def _fields(**changes):
    return json.dumps({"format": 1, "machine": MACHINE, "choices": {"a": FAST.to_dict()}} | changes)


DAMAGED = {
    "cut off": _fields()[:-20],
    "empty": "",
    "no object": "[]",
    "another format": _fields(format=2),
    "another machine": _fields(machine={"cpu": "other", "threads": 2}),
    "choices missing": json.dumps({"format": 1, "machine": MACHINE}),
    "choices no object": _fields(choices=[]),
    "no provider": _fields(choices={"a": {"microseconds": {NATIVE: 1}, "rows": 1}}),
    "provider without a time": _fields(choices={"a": {**FAST.to_dict(), "provider": "MKL"}}),
    "not a time": _fields(choices={"a": {**FAST.to_dict(), "microseconds": {"oneDNN": "fast"}}}),
    "no time at all": _fields(choices={"a": {**FAST.to_dict(), "microseconds": {"oneDNN": 0}}}),
    "more rows than a float has": _fields().replace('"rows": 128', '"rows": 1e999'),
    "a number of 400 digits": _fields().replace("1000.0", "9" * 400),
    "a number of 5,000 digits": _fields().replace("1000.0", "9" * 5000),
    "nested too deeply": "[" * 100_000,
    "a pickle": b"\x80\x04K\x01.",
    "binary": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_or_foreign_is_ignored_with_one_warning_and_replaced(text, tmp_path):
    store = Store(tmp_path, MACHINE)
    store.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match="ignored and will be repeated"):
        assert store.load() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load() == {}
        assert store.add({"b": SLOW}) == {"b": SLOW}
        assert Store(tmp_path, MACHINE).load() == {"b": SLOW}


def test_a_folder_that_cannot_be_written_to_is_tolerated(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = Store(blocked / "folder", MACHINE)
    with pytest.warns(UserWarning, match="ignored"):
        store.load()
    assert store.add({"a": FAST}) == {"a": FAST}
    assert "file" in store.problem


def test_a_lock_that_hangs_is_not_waited_for(tmp_path):
    store = Store(tmp_path, MACHINE)
    with FileLock(store.path.with_suffix(".lock")):
        assert store.add({"a": FAST}) == {"a": FAST}
    assert store.problem
    assert not store.path.exists()
    assert store.add({"a": FAST}) == {"a": FAST}
    assert store.problem is None


def test_a_failed_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    store = Store(tmp_path, MACHINE)
    store.add({"a": FAST})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    store.add({"b": SLOW})
    assert "disk full" in store.problem
    assert store.load() == {"a": FAST}
    assert [Path(path).suffix for path in os.listdir(tmp_path)].count(".tmp") == 0
