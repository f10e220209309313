"""Who decides on torch's threads: an argument, the environment, an earlier call, or the hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_cpu_accel.runtime import hardware, threads

REASON = "2 because the control group (container) grants 2 CPUs of the 8 cores that this process may use"


@pytest.fixture(autouse=True)
def _same_threads_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_applied", None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> hardware.CPUInfo:
    """Eight cores with sixteen hardware threads, of which the container may use the time of two."""
    cpu = replace(
        hardware.probe(),
        physical_cores=8,
        logical_cores=16,
        affinity=tuple(range(16)),
        affinity_cores=8,
        cgroup_quota=2.0,
        threads=2,
        thread_reason=REASON,
    )
    monkeypatch.setattr(hardware, "detect", lambda: cpu)
    return cpu


@pytest.mark.parametrize("default", [8, 16])
def test_oversubscribed_container(container: hardware.CPUInfo, default: int) -> None:
    choice = threads.choose(default, container, {})
    assert choice == threads.ThreadChoice(2, REASON, "hardware")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("value", ["16", "16,2"])
def test_environment_is_respected(container: hardware.CPUInfo, name: str, value: str) -> None:
    choice = threads.choose(16, container, {name: value})
    assert (choice.count, choice.source) == (16, "environment")
    assert f"{name}={value}" in choice.reason


def test_environment_without_effect_is_told(container: hardware.CPUInfo) -> None:
    choice = threads.choose(16, container, {"OMP_NUM_THREADS": "4"})
    assert (choice.count, choice.source) == (2, "hardware")
    assert "OMP_NUM_THREADS=4 has no effect" in choice.reason


def test_empty_variable_is_no_choice(container: hardware.CPUInfo) -> None:
    assert threads.choose(16, container, {"OMP_NUM_THREADS": ""}).source == "hardware"


def test_earlier_call_is_respected(container: hardware.CPUInfo) -> None:
    choice = threads.choose(3, container, {})
    assert (choice.count, choice.source) == (3, "user")
    assert "torch.set_num_threads(3)" in choice.reason


def test_apply_sets_torch_once(container: hardware.CPUInfo) -> None:
    torch.set_num_threads(8)
    first = threads.apply_threads()
    assert torch.get_num_threads() == first.count == 2
    assert threads.apply_threads() is first


def test_call_after_ours_is_the_users(container: hardware.CPUInfo) -> None:
    torch.set_num_threads(8)
    threads.apply_threads()
    torch.set_num_threads(8)  # torch's own default, but somebody set it again
    choice = threads.apply_threads()
    assert (choice.count, choice.source, torch.get_num_threads()) == (8, "user", 8)


def test_argument_wins(container: hardware.CPUInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    choice = threads.apply_threads(1)
    assert (choice.count, choice.source, torch.get_num_threads()) == (1, "argument", 1)
    assert threads.apply_threads() == choice


def test_argument_beyond_the_limit_is_told(container: hardware.CPUInfo) -> None:
    assert "only 2 can run at a time" in threads.apply_threads(3).reason


@pytest.mark.parametrize(
    ("bad", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError), (2.0, TypeError)],
)
def test_bad_argument(bad: int, error: type[Exception]) -> None:
    before = torch.get_num_threads()
    with pytest.raises(error, match="threads="):
        threads.apply_threads(bad)
    assert torch.get_num_threads() == before
