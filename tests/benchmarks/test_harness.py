"""The harness end to end on a tiny model: real worker processes."""

from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.driver import WorkerError
from benchmarks.quiet import exclusive, group_priority
from tests.benchmarks.conftest import PROBE


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_probes: None) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))


@pytest.mark.usefixtures("forked_workers")
def test_systems_run_side_by_side_and_a_broken_one_is_reported() -> None:
    said: list[str] = []
    records = harness.run(
        "bert-tiny:1x8",
        ["ours-fp32", "no-such-system"],
        rounds=2,
        calls=2,
        seconds=0.0,
        threads=1,
        priority=False,
        say=said.append,
    )
    base, ours, broken = records
    assert [r.system for r in records] == ["eager-fp32", "ours-fp32", "no-such-system"]
    assert base.timing == base.base
    assert ours.timing is not None
    assert [len(calls) for calls in ours.timing.rounds] == [2, 2]
    assert ours.agreement is not None
    assert ours.agreement.max_relative_error < 1e-4
    assert ours.ready["model_bytes"] > 4e6
    assert "KeyError: 'no-such-system'" in str(broken.error)
    assert ours.probes == (PROBE, PROBE)
    assert "bert-tiny:1x8: measuring" in said


class FakeWorker:
    def __init__(self, system: str, seconds: float) -> None:
        self.system, self.seconds = system, seconds
        self.bursts: list[tuple[float, ...]] = []

    def burst(self, calls: int, seconds: float) -> tuple[float, ...]:
        return (self.seconds,) * calls


def test_a_long_call_is_a_burst() -> None:
    workers = [FakeWorker("eager-fp32", 9.0), FakeWorker("ours-int8", 1.5)]
    harness._bursts(workers, rounds=2, calls=3, seconds=0.0)
    assert [len(burst) for worker in workers for burst in worker.bursts] == [1, 1, 3, 3]


def test_a_base_that_fails_ends_the_run() -> None:
    with pytest.raises(WorkerError, match="bert-huge"):
        harness.run(
            "bert-huge:1x8", [], rounds=1, calls=1, seconds=0.0, priority=False, say=lambda text: None
        )


@pytest.mark.serial
def test_priority_is_put_back() -> None:
    path = Path("/proc/self/autogroup")
    before = path.read_text() if path.exists() else ""
    with group_priority(-1) as permitted:
        assert permitted == (path.exists() and path.read_text() != before)
    assert (path.read_text() if path.exists() else "") == before


def test_the_lock_is_exclusive(tmp_path: Path) -> None:
    import fcntl

    lock = tmp_path / "bench" / "lock"
    with exclusive(), lock.open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
