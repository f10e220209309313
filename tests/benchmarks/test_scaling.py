"""The cost model of benchmarks/scaling: what it is given it gives back, and the page has what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.scaling import cost
from benchmarks.scaling.measured import read, record
from tests.acceptance.documents import ROOT

PAGE = ROOT / "docs" / "scaling.md"


@pytest.mark.parametrize("of_two", [1.0, 1.4, 2.0])
def test_workers_give_back_what_two_showed(of_two: float) -> None:
    workers = cost.Workers.of(of_two)
    assert workers.speedup(1) == 1
    assert workers.speedup(2) == pytest.approx(of_two)
    assert workers.speedup(64) <= 64 if of_two == 2 else workers.speedup(64) < 1 / workers.serial + 1e-9


def test_more_than_twice_and_less_than_once_are_bounded() -> None:
    assert cost.Workers.of(2.2).speedup(64) == 64
    assert cost.Workers.of(0.8).speedup(64) == 1
    with pytest.raises(ValueError, match="speedup_of_two=0"):
        cost.Workers.of(0)


def test_ranks_divide_the_weights_and_pay_for_sums() -> None:
    ranks = cost.Ranks(token_ms=100, layers=24, hidden=1024, link_us=10, link_gbs=10)
    assert ranks.speedup(1) == 1
    assert ranks.sum_us(2) == pytest.approx(2 * (10 + 1024 * 4 / 2 / 1e4))
    two = 100 / 2 + 48 * ranks.sum_us(2) / 1e3
    assert ranks.speedup(2) == pytest.approx(100 / two)
    best = max(cost.counts(64), key=ranks.speedup)
    assert 2 < best < 64  # a ring gets longer with every rank
    free = cost.Ranks(token_ms=100, layers=24, hidden=1024, link_us=0, link_gbs=1e9)
    assert free.speedup(64) == pytest.approx(64, rel=1e-3)


def test_a_link_is_found_by_two_sums() -> None:
    ranks = cost.Ranks(token_ms=1, layers=1, hidden=1, link_us=30, link_gbs=2)
    large = cost.Ranks(token_ms=1, layers=1, hidden=1 << 20, link_us=30, link_gbs=2)
    latency, rate = cost.link_of(ranks.sum_us(2), large.sum_us(2) / 1e3, 1 << 20)
    assert latency == pytest.approx(30, rel=1e-2)
    assert rate == pytest.approx(2, rel=1e-2)


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    record("ray replicas", {"one_per_s": 100.0, "two_per_s": 160.0}, file)
    record("partitions, GCN", {"one_s": 2.0, "two_s": 1.25}, file)
    kept = read(file)
    assert kept["ray replicas"]["machine"]
    found = cost.rows(kept)
    assert found["ray replicas"].speedup(2) == pytest.approx(1.6)
    assert found["partitions, GCN"].speedup(2) == pytest.approx(1.6)


def test_the_page_has_the_table_that_the_command_prints() -> None:
    output = CliRunner().invoke(_app(), [], env={"COLUMNS": "200"}).output
    printed = {re.split(r"\s{2,}", line.strip())[0]: line.split()[-7:] for line in output.splitlines()[2:]}
    rows = re.findall(r"^\| ([^|]+?) \|((?: [\d.]+ \|){7})$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(cost.rows(read(), 20, 10))
    for name, numbers in rows:
        assert re.findall(r"[\d.]+", numbers) == printed[name], name


def _app():
    import typer

    app = typer.Typer()
    app.command()(cost.main)
    return app
