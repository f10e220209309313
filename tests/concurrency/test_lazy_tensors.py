"""A tensor that is computed when somebody needs it is computed once, whoever asks and however many at a time."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from benchmarks.soak.served import SERVED
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.convolution.deferred import DeferredConvolution
from hf_cpu_accel.rewrite.decoder import deferred
from hf_cpu_accel.rewrite.decoder.deferred import DeferredHiddenStates


class Slow(LazyTensor):
    """Counts how often it is made; fails the first `failures` times."""

    @classmethod
    def of(cls, failures=0):
        slow = cls.like((3,), torch.float32)
        slow.made, slow.failures = 0, failures
        return slow

    def _make(self):
        self.made += 1
        time.sleep(0.02)  # long enough for the other threads to come
        if self.made <= self.failures:
            raise MemoryError
        return torch.arange(3.0)


def together(*calls):
    """The results of the calls, each in a thread of its own, begun at the same time; errors are results, too."""
    results, start = [None] * len(calls), threading.Barrier(len(calls))

    def run(place):
        start.wait()
        try:
            with torch.no_grad():
                results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_eight_threads_make_it_once():
    slow = Slow.of()
    results = together(*[lambda: slow + 1] * 8)
    assert slow.made == 1
    assert all(torch.equal(result, torch.arange(1.0, 4.0)) for result in results)


def test_all_see_what_one_of_them_writes():
    slow = Slow.of()
    together(*[lambda place=place: slow[place].add_(10) for place in range(3)])
    assert slow.made == 1
    assert torch.equal(slow + 0, torch.arange(10.0, 13.0))


def test_a_failure_is_tried_again():
    slow = Slow.of(failures=1)
    with pytest.raises(MemoryError):
        slow + 1
    assert torch.equal(slow + 1, torch.arange(1.0, 4.0))


def _hidden_states(monkeypatch):
    """After both layers of a decoder, and how many layers each call of the op has run since."""
    model = accelerate_for_cpu(SERVED["decoder"].build(), dtype="float32")
    seen, runs, op = [], [], deferred._DECODER_LAYERS

    def slow(*args):
        runs.append(len(args[3]))
        time.sleep(0.01)
        return op(*args)

    SERVED["decoder"].answer(model, 0)
    monkeypatch.setattr(DeferredHiddenStates, "after", _noting(DeferredHiddenStates.after, seen))
    with torch.no_grad():
        model.model.norm = nn.Identity()
        output = model.model(torch.arange(1, 6)[None], use_cache=False).last_hidden_state
    assert isinstance(output, DeferredHiddenStates)
    monkeypatch.setattr(deferred, "_DECODER_LAYERS", slow)
    return seen, runs


def _noting(after, seen):
    def noted(*args):
        seen.append(after(*args))
        return seen[-1]

    return noted


def test_each_layer_runs_once_whichever_hidden_states_are_read_first(monkeypatch):
    (first, second), runs = _hidden_states(monkeypatch)
    results = together(*[lambda: first * 1, lambda: second * 1] * 4)
    assert sum(runs) == 2
    for number, states in enumerate((first, second)):
        assert all(torch.equal(result, states.tensor) for result in results[number::2])


def test_two_threads_go_on_from_the_same_hidden_states(monkeypatch):
    (first, _), _ = _hidden_states(monkeypatch)
    layer = first._next()._calls[-1]
    results = together(*[lambda: DeferredHiddenStates.after(first, layer) * 1, lambda: first * 1] * 4)
    assert all(isinstance(result, torch.Tensor) for result in results)
    assert all(torch.equal(result, results[0]) for result in results[::2])
    assert all(torch.equal(result, first.tensor) for result in results[1::2])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))


@pytest.fixture
def convolved():
    """Two outputs of convolutions that still wait, and what they are."""
    torch.manual_seed(0)
    model, image = Convolutions().eval(), torch.randn(1, 16, 8, 8)
    with torch.no_grad():
        expected = [model.one(image), model.other(image)]
    accelerate_for_cpu(model, dtype="float32")
    for convolution in (model.one, model.other):
        convolution.waits = True
    with torch.no_grad():
        outputs = [model.one(image), model.other(image)]
    assert all(isinstance(output, DeferredConvolution) for output in outputs)
    return outputs, expected


def test_threads_that_add_two_convolutions_either_way_do_not_wait_for_each_other(convolved):
    (one, other), (first, second) = convolved
    for result in together(*[lambda: one + other, lambda: other + one] * 4):
        torch.testing.assert_close(result + 0, first + second)


def test_threads_that_make_different_things_of_one_convolution(convolved):
    (one, _), (first, _) = convolved
    calls = [lambda: one * 1, lambda: one.relu(), lambda: one + first, lambda: nn.functional.silu(one)]
    expected = [first, first.relu(), first + first, nn.functional.silu(first)]
    for result, right in zip(together(*calls * 2), expected * 2, strict=True):
        torch.testing.assert_close(result + 0, right)
