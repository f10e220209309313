import threading

import pytest
import torch

from hf_cpu_accel.providers import choice, machine, switch
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.budget import AT_ONCE_SECONDS, SHARE_OF_TIME, Budget
from hf_cpu_accel.providers.choice import FEWEST_ROWS, measured_rows_of, row_range
from hf_cpu_accel.providers.store import Store
from hf_cpu_accel.providers.torch_ops import Provider
from tests.providers.conftest import MACHINE, Measurements, make_chooser

PROVIDERS = (Provider("other", "float32", lambda packed, values: None),)


class SomeWork:
    """Counts how often it is done, and by whom."""

    dtype = "float32"
    in_features = 8
    products = 64

    def __init__(self, key="linear 8x8 float32"):
        self.key = key
        self.done = []

    def own(self, input):
        self.done.append(NATIVE)

    def by(self, provider):
        return lambda input: self.done.append(provider.name)

    def sample(self, rows, dtype):
        return (torch.zeros(rows, self.in_features, dtype=dtype),)


@pytest.fixture
def measurements():
    return Measurements("other")


@pytest.fixture
def chooser(tmp_path, measurements):
    return make_chooser(tmp_path, measurements, find_candidates=lambda dtype: PROVIDERS)


def again(tmp_path, measurements):
    """Another process on the same machine."""
    return make_chooser(tmp_path, measurements, find_candidates=lambda dtype: PROVIDERS)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, (1, 1)),
        (2, (2, 2)),
        (3, (3, 4)),
        (16, (9, 16)),
        (17, (17, 32)),
        (128, (65, 128)),
        (1024, (513, 1024)),
        (1025, (1025, 2048)),
        (2049, (1025, 2048)),
        (99999, (1025, 2048)),
    ],
)
def test_ranges_end_at_powers_of_two(rows, expected):
    assert row_range(rows) == expected


def test_no_range_is_measured_in_part():
    assert row_range(FEWEST_ROWS)[0] == FEWEST_ROWS


def test_long_measurements_are_on_fewer_rows():
    work = SomeWork()
    assert measured_rows_of(work, 100, threads=2) == 128
    work.products = 3072 * 768
    assert measured_rows_of(work, 100, threads=2) == 128
    assert measured_rows_of(work, 1024, threads=2) == 128
    assert measured_rows_of(work, 1024, threads=16) == 1024
    work.products = 10**9
    assert measured_rows_of(work, 1024, threads=1) == 64
    assert measured_rows_of(work, 16, threads=1) == 16


def test_measured_once_and_kept(chooser, measurements, tmp_path):
    work = SomeWork()
    made = chooser.choose(work, 20, torch.float32)
    assert (made.provider, made.rows) == ("other", 32)
    assert measurements.held == [[NATIVE, "other"]]
    assert chooser.choose(work, 32, torch.float32) == made
    assert again(tmp_path, measurements).choose(work, 17, torch.float32) == made
    assert len(measurements.held) == 1


def test_what_is_another_question_is_measured_anew(chooser, measurements):
    torch.set_num_threads(1)
    chooser.choose(SomeWork(), 20, torch.float32)
    chooser.choose(SomeWork(), 33, torch.float32)
    chooser.choose(SomeWork(), 20, torch.bfloat16)
    chooser.choose(SomeWork("linear+gelu 8x8 float32"), 20, torch.float32)
    torch.set_num_threads(2)
    chooser.choose(SomeWork(), 20, torch.float32)
    assert len(measurements.held) == 5


@pytest.mark.parametrize(("steady", "busy"), [(False, False), (True, True)])
def test_an_answer_that_may_be_noise_is_for_this_process_only(tmp_path, steady, busy):
    measurements = Measurements("other", steady=steady)
    chooser = make_chooser(
        tmp_path, measurements, find_candidates=lambda dtype: PROVIDERS, is_busy=lambda: busy
    )
    for _ in range(2):
        assert chooser.choose(SomeWork(), 20, torch.float32).provider == "other"
    assert len(measurements.held) == 1
    again(tmp_path, measurements).choose(SomeWork(), 20, torch.float32)
    assert len(measurements.held) == 2


def test_the_answer_of_a_faster_process_is_taken(chooser, tmp_path):
    other = make_chooser(tmp_path, Measurements(NATIVE), find_candidates=lambda dtype: PROVIDERS)
    assert chooser.choose(SomeWork("a"), 20, torch.float32).provider == "other"
    assert other.choose(SomeWork("b"), 20, torch.float32).provider == NATIVE
    assert chooser.choose(SomeWork("b"), 20, torch.float32).provider == NATIVE


def test_without_candidates_nothing_runs(tmp_path, measurements):
    chooser, work = make_chooser(tmp_path, measurements, find_candidates=lambda dtype: ()), SomeWork()
    assert chooser.choose(work, 20, torch.float32).provider == NATIVE
    assert work.done == []
    assert not list(tmp_path.iterdir())


def test_candidates_without_room_do_not_take_part(chooser, measurements):
    work = SomeWork()

    def no_room(provider):
        raise MemoryError

    work.by = no_room
    assert chooser.choose(work, 20, torch.float32).provider == NATIVE
    assert measurements.held == [[NATIVE]]


def test_nobody_waits_for_a_measurement(chooser):
    inside, go_on = threading.Event(), threading.Event()
    work = SomeWork()

    def slow(input):
        inside.set()
        assert go_on.wait(30)

    work.own = slow
    measuring = threading.Thread(target=chooser.choose, args=(work, 20, torch.float32))
    measuring.start()
    assert inside.wait(30)
    assert chooser.choose(SomeWork("another"), 20, torch.float32) is None
    go_on.set()
    measuring.join()
    assert chooser.choose(SomeWork("another"), 20, torch.float32).provider == "other"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_budget_grows_with_time_and_may_be_overdrawn():
    clock = Clock()
    budget = Budget(clock)
    assert budget.left() == AT_ONCE_SECONDS
    budget.spend(AT_ONCE_SECONDS + 0.1)
    assert budget.left() == pytest.approx(-0.1)
    clock.now += 0.1 / SHARE_OF_TIME
    assert budget.left() == pytest.approx(0)


def test_measuring_stops_when_the_budget_is_spent_and_goes_on_later(tmp_path, measurements):
    clock = Clock()
    chooser = make_chooser(
        tmp_path, measurements, find_candidates=lambda dtype: PROVIDERS, budget=Budget(clock), clock=clock
    )
    first, second = SomeWork("first"), SomeWork("second")

    def takes(seconds):
        def own(input):
            clock.now += seconds

        return own

    first.own, second.own = takes(AT_ONCE_SECONDS / 20), takes(AT_ONCE_SECONDS / 6)
    assert chooser.choose(first, 20, torch.float32).provider == "other"
    # One call says that a measurement will not fit into what is left; the next question does not even make that call.
    assert chooser.choose(second, 20, torch.float32) is None
    now = clock.now
    assert chooser.choose(second, 20, torch.float32) is None
    assert clock.now == now
    assert len(measurements.held) == 1
    clock.now += AT_ONCE_SECONDS / SHARE_OF_TIME
    assert chooser.choose(second, 20, torch.float32).provider == "other"


def test_the_machine_key_names_what_times_depend_on():
    key = machine.machine_key(3)
    assert key["threads"] == 3
    assert key["torch"] == torch.__version__
    assert {"cpu", "flags", "tier", "package", "kernels"} <= set(key)
    assert machine.machine_key(3) == key


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (4.0, False), (6.0, True)])
def test_a_busy_machine_is_told_by_its_load(monkeypatch, load, busy):
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    assert machine.is_busy() is busy


def test_the_store_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    choice.chooser.cache_clear()
    store = choice.chooser().store(2)
    choice.chooser.cache_clear()
    assert store.path.parent == tmp_path / "providers"
    assert store.path == Store(tmp_path / "providers", machine.machine_key(2)).path
    assert store.path != Store(tmp_path / "providers", MACHINE).path


@pytest.mark.parametrize(
    ("asked", "environ", "reason"),
    [
        ("own", {}, 'providers="own"'),
        ("auto", {switch.VARIABLE: "own"}, "HF_CPU_ACCEL_PROVIDERS=own"),
        ("own", {switch.VARIABLE: "auto"}, 'providers="own"'),
        ("auto", {}, None),
        ("auto", {switch.VARIABLE: "auto"}, None),
        ("auto", {switch.VARIABLE: ""}, None),
    ],
)
def test_the_switch(asked, environ, reason, monkeypatch):
    _machine(monkeypatch)
    assert switch.why_not(asked, environ) == reason
    assert switch.measured(asked, environ) == (reason is None)


def test_a_misspelt_switch_is_an_error():
    with pytest.raises(ValueError, match="HF_CPU_ACCEL_PROVIDERS='off': expected 'auto' or 'own'"):
        switch.measured("own", {switch.VARIABLE: "off"})


def test_capped_and_missing_kernels_are_not_compared(monkeypatch):
    _machine(monkeypatch, tier="avx2")
    assert "caps" in switch.why_not("auto", {})
    _machine(monkeypatch, loaded=False)
    assert "not loaded" in switch.why_not("auto", {})


def _machine(monkeypatch, *, tier="avx512", loaded=True):
    class Status:
        pass

    class CPU:
        uncapped_tier = "avx512"

    Status.loaded, CPU.tier = loaded, tier
    monkeypatch.setattr(switch.extension, "status", lambda: Status)
    monkeypatch.setattr(switch.hardware, "detect", lambda: CPU)
