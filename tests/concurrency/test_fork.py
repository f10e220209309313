"""A process that is forked after models were used (`gunicorn --preload`, workers of a `DataLoader`) answers, and right."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from pathlib import Path

import pytest
import torch

from benchmarks.soak.served import SERVED
from hf_cpu_accel import accelerate_for_cpu, explain, lifecycle, restore
from hf_cpu_accel.runtime import fork

_LAST_RESORT = 1500  # seconds by the clock, against a child that waits for ever


def in_child(run):
    """Whether `run` came to its end in a forked process; what it raised is printed."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    code = 1
    try:
        signal.alarm(_LAST_RESORT)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def use_all_threads():
    """An op of torch that starts its threads: tiny models do not."""
    ones = torch.ones(256, 1024)
    assert ones.exp().sum() > 0
    assert torch.equal(ones @ ones.T, torch.full((256, 256), 1024.0))


@pytest.fixture(params=["encoder", "decoder", "gnn"])
def used(request, threads):
    """(kind, an accelerated model that has answered, its answers)."""
    served = SERVED[request.param]
    torch.set_num_threads(threads)
    model = accelerate_for_cpu(served.build(), dtype="float32", threads=threads)
    answers = [served.answer(model, number) for number in range(3)]
    use_all_threads()
    return served, model, answers


def assert_serves(served, model, answers):
    use_all_threads()
    for number, expected in enumerate(answers):
        assert served.agrees(served.answer(model, number), expected)


def test_a_child_answers_as_its_parent(used):
    served, model, answers = used
    count = torch.get_num_threads()

    def child():
        assert torch.get_num_threads() == count
        assert_serves(served, model, answers)
        assert in_child(lambda: assert_serves(served, model, answers))  # of a child that has computed, too

    assert in_child(child)
    assert torch.get_num_threads() == count
    assert_serves(served, model, answers)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_child_can_restore_and_accelerate(dtype, threads):
    served = SERVED["encoder"]
    model = served.build()
    before = served.answer(model, 0)
    accelerate_for_cpu(model, dtype=dtype, threads=threads)
    answer = served.answer(model, 0)
    use_all_threads()

    def child():
        restore(model)
        assert torch.equal(served.answer(model, 0), before)
        accelerate_for_cpu(model, dtype=dtype)
        assert torch.equal(served.answer(model, 0), answer)

    assert in_child(child)
    assert explain(model).replaced  # the parent's is another one
    assert torch.equal(served.answer(restore(model), 0), before)


def test_locks_that_other_threads_hold_are_free_in_a_child():
    served = SERVED["encoder"]
    model, held, leave = (
        accelerate_for_cpu(served.build(), dtype="float32"),
        threading.Event(),
        threading.Event(),
    )

    def hold():
        with lifecycle.lock:
            held.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert in_child(lambda: restore(model))
    finally:
        leave.set()
        holder.join()


class Embedded(torch.utils.data.Dataset):
    """Computes its items with an accelerated model, in the workers of a loader."""

    def __init__(self, served, model):
        self.served, self.model = served, model

    def __len__(self):
        return 6

    def __getitem__(self, number):
        torch.set_num_threads(2)  # a worker has one
        use_all_threads()
        return self.served.answer(self.model, number)[0]


def test_workers_of_a_loader():
    served = SERVED["encoder"]
    torch.set_num_threads(2)
    model = accelerate_for_cpu(served.build(), dtype="float32", threads=2)
    use_all_threads()
    expected = torch.stack([served.answer(model, number)[0] for number in range(6)])
    loader = torch.utils.data.DataLoader(
        Embedded(served, model), batch_size=3, num_workers=2, multiprocessing_context="fork"
    )
    assert served.agrees(torch.cat(list(loader)), expected)


def _answers(numbers):
    return [SERVED["encoder"].answer(_pooled, number).tolist() for number in numbers]


def test_a_pool_of_processes():
    global _pooled
    torch.set_num_threads(2)
    _pooled = accelerate_for_cpu(SERVED["encoder"].build(), dtype="int8", threads=2)
    expected = _answers(range(6))
    use_all_threads()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_answers, [range(3), range(3, 6)]) == [expected[:3], expected[3:]]


def test_the_openmp_that_is_loaded_is_found(tmp_path):
    """And nothing else: what lies where the table of this process does not say it is not loaded."""
    if "libgomp" in Path("/proc/self/maps").read_text():
        assert fork._runtimes()
    maps = tmp_path / "proc" / "self" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 1 {tmp_path}/libgomp.so.1\n7f01-7f02 r--p 0 0 0 /usr/lib/libc.so.6\n"
    )
    assert fork._runtimes(tmp_path) == ()
