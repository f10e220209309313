"""The cost model of benchmarks/scaling: what it is given it gives back, and the page has what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.scaling import cost
from benchmarks.scaling.measured import read, record

TWO = {"one_token_ms": 100, "threads_token_ms": 55, "one_mb": 500, "weights_mb": 251, "token_ms": 62}
RANKS = {**TWO, "exchange_us": 100, "gloo_us": 900, "layers": 24, "hidden": 1024}


@pytest.mark.parametrize("of_two", [1.0, 1.4, 2.0])
def test_workers_give_back_what_two_showed(of_two: float) -> None:
    workers = cost.Workers.of(of_two)
    assert workers.speedup(1) == 1
    assert workers.speedup(2) == pytest.approx(of_two)
    assert of_two <= workers.speedup(64) <= 64


def test_more_than_twice_and_less_than_once_are_bounded() -> None:
    assert cost.Workers.of(2.2).speedup(64) == 64
    assert cost.Workers.of(0.8).speedup(64) == 1
    with pytest.raises(ValueError, match="speedup_of_two=0"):
        cost.Workers.of(0)


def test_nothing_is_told_of_two_that_did_no_more_than_one() -> None:
    assert not cost.rows({"replicas": {"one_per_s": 144.0, "two_per_s": 137.0}}, 20, 10)


def test_ranks_give_back_what_two_showed_and_pay_for_sums() -> None:
    local = cost.rows({"ranks": RANKS}, 20, 10)["ranks, one machine"]
    assert local.speedup(1) == 1
    assert local.speedup(2) == pytest.approx(100 / 62)
    assert local.speedup(4) == pytest.approx(100 / (25 + 48 * 0.3 + local.rest_ms))
    assert local.speedup(64) < local.speedup(4)  # each rank reads what all others wrote
    free = cost.Ranks(token_ms=100, sums=48, sum_us=lambda count: 0.0)
    assert free.speedup(64) == pytest.approx(64)


def test_a_ring_of_machines() -> None:
    assert cost.ring_us(2, 1024, 10, 10) == pytest.approx(2 * (10 + 1024 * 4 / 2 / 1e4))
    ranks = cost.Ranks(100, 48, lambda count: cost.ring_us(count, 1024, 10, 10))
    assert 2 < max(cost.counts(64), key=ranks.speedup) < 64  # it gets longer with every machine


def test_what_is_recorded_is_read_and_told(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    record("replicas", {"one_per_s": 100.0, "two_per_s": 160.0}, file)
    record("partitions, GCN", {"one_s": 2.0, "threads_s": 1.5, "two_s": 1.25}, file)
    record("ranks", RANKS, file)
    kept = read(file)
    assert kept["replicas"]["machine"]
    assert kept["replicas"]["load"] >= 0
    for values in kept.values():
        values.update(load=2.0, machine={"cores": 2})
    found = cost.rows(kept, 20, 10)
    assert found["replicas"].speedup(2) == pytest.approx(1.6)
    assert found["partitions, GCN"].speedup(2) == pytest.approx(1.6)
    page = tmp_path / "page.md"
    page.write_text("<!-- measured -->\n<!-- end -->\ntext\n<!-- model -->\nold\n<!-- end -->\n")
    cost.write_page(page, kept)
    once = page.read_text()
    cost.write_page(page, kept)
    assert page.read_text() == once
    assert once.count("\ntext\n") == 1
    assert "| partitions, GCN | 2.00 s | 1.50 s | 1.25 s |" in page.read_text()
    assert "| ranks | 10.0 tokens/s | 18.2 tokens/s | 16.1 tokens/s |" in page.read_text()
    assert "| replicas | 1.0 | 1.6 |" in page.read_text()
    assert "old" not in page.read_text()


def test_what_was_measured_beside_other_work_is_not_told(tmp_path: Path) -> None:
    quiet, busy = ({**RANKS, "load": load, "machine": {"cores": 2}} for load in (3.0, 11.3))
    page = tmp_path / "page.md"
    page.write_text("<!-- measured -->\n<!-- end -->\n<!-- model -->\n<!-- end -->\n")
    cost.write_page(page, {"seen": quiet, "ranks": busy})
    text = page.read_text()
    assert "| seen | 10.0 tokens/s |" in text
    assert "| ranks" not in text
    assert "to be measured again: ranks (load 11.3, 2 cores)." in text
    cost.write_page(page, {"ranks": busy})
    assert page.read_text().count("Not measured yet on a machine with nothing else to do.") == 2
    assert "|" not in page.read_text()


def test_the_page_has_the_tables_of_what_was_measured() -> None:
    text = cost.PAGE.read_text(encoding="utf-8")
    for table in cost.page_tables(read()).values():
        assert table in text


def test_the_command_prints_as_many_sockets_as_asked_for() -> None:
    app = typer.Typer()
    app.command()(cost.main)
    result = CliRunner().invoke(app, ["--sockets", "8"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert result.output.splitlines()[0].split()[-4:] == ["1", "2", "4", "8"]
