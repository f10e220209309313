"""Timing statistics and the interleaving order."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel.measure import Timing, burst, interleaved, median_estimate, speedup


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_interval_holds_the_median_and_stays_in_range(samples: list[float]) -> None:
    estimate = median_estimate(samples)
    assert min(samples) <= estimate.low <= estimate.value <= estimate.high <= max(samples)
    assert estimate.value == statistics.median(samples)


@pytest.mark.parametrize(("n", "rank"), [(5, 1), (6, 1), (9, 2), (12, 3), (20, 6), (30, 10)])
def test_interval_ranks_match_the_sign_test_table(n: int, rank: int) -> None:
    estimate = median_estimate([float(i) for i in range(1, n + 1)])
    assert (estimate.low, estimate.high) == (rank, n + 1 - rank)


def test_turns_go_there_and_back() -> None:
    seen: list[str] = []
    calls: list[str] = []
    timings = interleaved(
        {name: lambda name=name: calls.append(name) for name in "abc"},
        rounds=3,
        calls=2,
        on_burst=seen.append,
    )
    assert seen == list("abccbaabc")
    assert calls[:6] == list("aaabbb")  # one unrecorded call, then two recorded ones
    assert all(len(t.rounds) == 3 and all(len(r) == 2 for r in t.rounds) for t in timings.values())


def test_burst_lasts_as_long_as_asked() -> None:
    times = burst(lambda: sum(range(1000)), calls=2, seconds=0.01)
    assert sum(times) >= 0.01
    assert len(times) > 2


def test_speedup_is_the_ratio_inside_a_round() -> None:
    # The machine slows down fourfold half-way; the ratio does not.
    base = Timing(((2.0,), (2.0,), (8.0,), (8.0,)))
    ours = Timing(((1.0,), (1.0,), (4.0,), (4.0,)))
    ratio = speedup(base, ours)
    assert (ratio.low, ratio.value, ratio.high) == (2.0, 2.0, 2.0)
    assert base.best == 2.0


def test_bad_input_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="samples is empty"):
        median_estimate([])
    with pytest.raises(ValueError, match="rounds=0"):
        interleaved({"a": int}, rounds=0)
    with pytest.raises(ValueError, match="one interleaved"):
        speedup(Timing(((1.0,),)), Timing(((1.0,), (1.0,))))
