"""A call that is broken off anywhere leaves nothing behind: the next answer is right, and so is the model that comes back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from benchmarks.soak.served import SERVED
from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.patching.interruption import Uninterrupted
from hf_cpu_accel.patching.restore import Journal
from tests.concurrency.faults import Fault, Lines, is_stopped_at, lines_of, places


class Terminated(Exception):
    """What the handlers of these tests raise."""


class Signal:
    """A change whose undoing is when a signal arrives."""

    def __init__(self, number):
        self.number = number

    def undo(self):
        signal.raise_signal(self.number)


@pytest.fixture
def handler():
    """SIGTERM raises, as in servers that end by an exception, and SIGINT, which a shell's background jobs are started without."""

    def terminate(number, frame):
        raise Terminated

    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, new) for number, new in handlers.items()}
    yield terminate
    for number, old in before.items():
        signal.signal(number, old)


def _state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_is_original(served, model, modules, state, expected):
    assert explain(model).items == ()
    assert [(path, id(module)) for path, module in model.named_modules()] == modules
    now = model.state_dict()
    assert list(now) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in now.items())
    assert torch.equal(served.answer(model, 0), expected)


# Python itself drops what is raised where an object's end is noticed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("encoder", "float32", 40),
        ("encoder", "int8", 40),
        ("decoder", "float32", 40),
        ("unet", "float32", 4),
        ("gnn", "float32", 40),
    ],
)
def test_a_call_that_fails_anywhere_leaves_no_trace(name, dtype, most):
    served = SERVED[name]
    model = accelerate_for_cpu(served.build(), dtype=dtype)
    expected = [served.answer(model, number) for number in range(3)][1]
    lines = places(lines_of(lambda: served.answer(model, 2)), most)
    stopped = 0
    for line in lines:
        stopped += is_stopped_at(line, lambda: served.answer(model, 2))
        assert served.agrees(served.answer(model, 1), expected)
    assert stopped >= len(lines) // 2  # later calls take fewer lines than the first one
    restore(model)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_first_call_that_fails_anywhere_leaves_no_trace(name):
    served = SERVED[name]
    expected = served.answer(served.build(), 1)
    first = accelerate_for_cpu(served.build(), dtype="float32", verify="first")
    for line in places(lines_of(lambda: served.answer(first, 1)), 6):
        model = accelerate_for_cpu(served.build(), dtype="float32", verify="first")
        is_stopped_at(line, lambda model=model: served.answer(model, 2))
        assert served.agrees(served.answer(model, 1), expected)
        assert all("first call" not in (item.reason or "") for item in explain(model).items)


@pytest.mark.parametrize(
    ("name", "dtype"), [("encoder", "int8"), ("decoder", "float32"), ("gnn", "bfloat16")]
)
def test_an_acceleration_that_fails_anywhere_leaves_the_model_as_it_was(name, dtype):
    served = SERVED[name]
    model = served.build()
    expected, state = served.answer(model, 0), _state(model)
    modules = [(path, id(module)) for path, module in model.named_modules()]
    total = lines_of(lambda: accelerate_for_cpu(model, dtype=dtype))
    restore(model)
    for line in places(total, 12):
        is_stopped_at(line, lambda: accelerate_for_cpu(model, dtype=dtype))
        restore(model)  # of the last lines, when all was done
        _assert_is_original(served, model, modules, state, expected)


@pytest.mark.parametrize(("name", "dtype"), [("encoder", "int8"), ("decoder", "float32")])
def test_a_restore_that_fails_anywhere_goes_on_when_it_is_called_again(name, dtype):
    served = SERVED[name]
    model = served.build()
    expected, state = served.answer(model, 0), _state(model)
    modules = [(path, id(module)) for path, module in model.named_modules()]
    accelerate_for_cpu(model, dtype=dtype)
    line, stopped, ends = 1, 0, False
    while not ends:  # on and on with one model: as if no two lines of it could be run without a failure
        ends = not is_stopped_at(line, lambda: restore(model))
        stopped += not ends
        line += 61
    assert stopped > 8
    _assert_is_original(served, model, modules, state, expected)


def test_a_failure_while_a_failed_acceleration_is_undone(monkeypatch):
    """The model is then in between; `restore` goes on, and so does accelerating it anew."""
    served = SERVED["encoder"]
    model = served.build()
    expected, state = served.answer(model, 0), _state(model)
    modules = [(path, id(module)) for path, module in model.named_modules()]
    total, undo = lines_of(lambda: accelerate_for_cpu(model, dtype="int8")), Journal.undo
    restore(model)

    def failing(journal):
        monkeypatch.setattr(Journal, "undo", undo)
        assert len(journal.changes) > 20
        journal.changes[-1].undo()
        raise MemoryError

    for again in (restore, lambda model: restore(accelerate_for_cpu(model, dtype="int8"))):
        monkeypatch.setattr(Journal, "undo", failing)
        with pytest.raises(MemoryError), Lines(total * 3 // 4):
            accelerate_for_cpu(model, dtype="int8")
        again(model)
        _assert_is_original(served, model, modules, state, expected)


def test_a_signal_in_the_middle_of_a_call(handler):
    """Sent by another thread at whichever moment, but not before the one sent last has arrived: two at once, as on a busy machine,
    would raise where the first is taken."""
    served = SERVED["decoder"]
    model = accelerate_for_cpu(served.build(), dtype="float32")
    expected = [served.answer(model, number) for number in range(3)]
    awaited = threading.Event()

    def interrupt():
        for _ in range(15):
            awaited.wait(10)  # Python drops what is raised where an object's end is noticed: on with the next
            awaited.clear()
            time.sleep(0.004)
            os.kill(os.getpid(), signal.SIGTERM)

    sender, ended = threading.Thread(target=interrupt), 0
    sender.start()
    while sender.is_alive():
        try:
            awaited.set()
            while sender.is_alive():
                served.answer(model, 2)
            served.answer(model, 2)  # the last signal may wait until here
        except Terminated:
            ended += 1
    assert ended > 0
    for number, answer in enumerate(expected):
        assert torch.equal(served.answer(model, number), answer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_model_is_restored_comes_after_it(number, handler):
    served = SERVED["encoder"]
    model = served.build()
    expected, state = served.answer(model, 0), _state(model)
    modules = [(path, id(module)) for path, module in model.named_modules()]
    accelerate_for_cpu(model, dtype="int8")
    before, journal = signal.getsignal(number), acceleration_of(model).journal
    for place in (3, len(journal.changes) // 2, len(journal.changes)):
        journal.changes.insert(place, Signal(number))
    with pytest.raises(Terminated if number == signal.SIGTERM else KeyboardInterrupt):
        restore(model)
    assert signal.getsignal(number) is before
    _assert_is_original(served, model, modules, state, expected)


def test_an_interrupted_start_of_the_block_loses_no_signal(monkeypatch, handler):
    block, real = Uninterrupted(), signal.signal

    def failing(number, new):
        result = real(number, new)
        if number == signal.SIGTERM:
            monkeypatch.undo()
            raise Fault
        return result

    monkeypatch.setattr(signal, "signal", failing)
    with pytest.raises(Fault):
        block.__enter__()
    try:
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    finally:
        block.__exit__()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_other_threads_than_the_main_one_have_nothing_to_wait_for(handler):
    def block():
        with Uninterrupted():
            assert signal.getsignal(signal.SIGTERM) is handler

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()


def test_an_op_without_memory_in_the_middle_of_a_call(monkeypatch):
    from hf_cpu_accel.rewrite.decoder import deferred

    served = SERVED["decoder"]
    model = accelerate_for_cpu(served.build(), dtype="float32")
    expected, op = served.answer(model, 1), deferred._DECODER_LAYERS
    for call in range(5):
        left = [call]

        def failing(*args, left=left):
            if not left[0]:
                raise MemoryError
            left[0] -= 1
            return op(*args)

        monkeypatch.setattr(deferred, "_DECODER_LAYERS", failing)
        with pytest.raises(MemoryError):
            served.answer(model, 2)
        monkeypatch.setattr(deferred, "_DECODER_LAYERS", op)
        assert torch.equal(served.answer(model, 1), expected)
