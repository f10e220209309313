"""A few seconds of `make soak`: lengths, dtypes, clients and restores as they come, and nothing wrong, and nothing left behind."""

from __future__ import annotations

import pytest
import torch

from benchmarks.soak.clients import Clients
from benchmarks.soak.memory import Held
from benchmarks.soak.run import Report, Soak, crowds, cycles
from benchmarks.soak.served import SERVED

# Much less than the smallest weight of the models takes: whoever loses one for each cycle is seen.
_BYTES_PER_CYCLE = 4096


def test_rounds_of_two_models_and_four_threads():
    soak = Soak(("encoder", "decoder", "gnn"))
    report = soak.run(lambda number: number < 4, requests=24)
    assert report.failures == []
    assert report.answered == 4 * 2 * 24
    assert len(report.held) == 4


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_cycles_leave_nothing_behind(name):
    served = SERVED[name]
    model = served.build()
    assert cycles(served, model, 6).failures == []  # what is imported and learnt once
    before = Held.now()
    report = cycles(served, model, 12)
    after = Held.now()
    assert report.failures == []
    assert after.files <= before.files
    assert after.objects - before.objects < 12 * 8  # less than one layer for each cycle
    if before.used is not None and after.used is not None:
        assert (after.used - before.used) / 12 < _BYTES_PER_CYCLE


def test_crowds_of_clients():
    report = crowds(16)
    assert report.failures == []
    assert report.answered == len(SERVED) * 2 * 16


def test_what_is_wrong_is_found():
    """In answers, and in a model that comes back with another weight."""
    served = SERVED["encoder"]
    model = served.build()
    answers = [served.answer(model, number) for number in range(3)]
    answers[1] = answers[1] + 0.01
    found = Clients(served, model, answers, 4).ask(lambda number: number < 12)
    assert len(found.failures) == 4
    assert all("off by 1.00e-02" in failure for failure in found.failures)
    answers[1] = answers[2]
    assert "of shape" in Clients(served, model, answers, 1).ask(lambda number: number < 3).failures[0]
    soak = Soak(("encoder", "gnn"))
    with torch.no_grad():
        soak._states["gnn"]["convs.0.bias"][0] += 1
    report = soak.run(lambda number: number < 1, requests=2)
    assert report.failures == ["gnn: convs.0.bias came back changed"]


def test_growth_counts_after_the_warm_up():
    megabytes = [100, 150, 200, 200, 201, 202, 203, 204]
    report = Report(held=[Held(size << 20, None, 0, 0) for size in megabytes])
    assert report.growth() == pytest.approx(203.5 / 200 - 1)
