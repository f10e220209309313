"""Comparisons with eager at few rows, of first calls, and of two checkouts, each on a tiny model."""

from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import few_rows, first_call, versus, workloads

ROOT = Path(__file__).parents[2]


def test_cells_of_few_rows():
    cells = list(few_rows.cells("bert-tiny", [1, 2], ["float32", "bfloat16"], rounds=1, seconds=0.0))
    assert [cell[:2] for cell in cells] == [("float32", 1), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)]
    assert all(gain > 0 for *_, gain in cells)


def test_a_row_of_first_calls():
    forward, more, gain = first_call.row(workloads.parse("bert-tiny:1x8"), "float32", rounds=1)
    assert float(forward) > 0
    assert more[0] in "+-"
    assert gain.endswith("x")


def test_a_checkout_beside_itself(tmp_path: Path) -> None:
    found = versus.compare(ROOT, ROOT, "bert-tiny:1x8=float32", tmp_path, rounds=2, seconds=0.0)
    assert len(found.ratios) == 2
    assert all(ratio > 0 for ratio in found.ratios)
    for pair in (found.accelerations, found.first_calls, found.imports):
        assert 0 < min(pair) <= max(pair) < 60


def comparison(row: str, *ratios: float) -> versus.Comparison:
    return versus.Comparison(row, sorted(ratios), (1.0, 2.0), (3.0, 3.0), (0.5, 0.4))


def test_a_second_measurement_adds_rounds_and_keeps_the_least_times() -> None:
    other = versus.Comparison("a=int8", [0.5, 1.5], (2.0, 1.0), (4.0, 2.0), (0.4, 0.6))
    both = comparison("a=int8", 0.9, 1.1).and_again(other)
    assert both == versus.Comparison("a=int8", [0.5, 0.9, 1.1, 1.5], (1.0, 1.0), (3.0, 2.0), (0.4, 0.4))
    assert both.ratio == 1.0


@pytest.mark.parametrize(
    ("ratios", "bounds", "measured", "code"),
    [
        ({"a=int8": [1.0], "b=int8": [1.0]}, ["--geomean", "0.995", "--lowest", "0.98"], 2, 0),
        ({"a=int8": [0.9], "b=int8": [1.2]}, ["--geomean", "0.995", "--lowest", "0.98"], 3, 1),
        ({"a=int8": [0.9, 1.1], "b=int8": [1.2]}, ["--geomean", "0.995", "--lowest", "0.98"], 3, 0),
        ({"a=int8": [0.99], "b=int8": [0.99]}, ["--geomean", "0.995", "--lowest", "0.98"], 2, 1),
        ({"a=int8": [0.1]}, [], 1, 0),
    ],
)
def test_bounds(
    monkeypatch: pytest.MonkeyPatch,
    ratios: dict[str, list[float]],
    bounds: list[str],
    measured: int,
    code: int,
) -> None:
    """A workload below the lowest is measured a second time; then both measurements count."""
    calls: list[str] = []

    def compare(before: Path, after: Path, row: str, *rest: object) -> versus.Comparison:
        calls.append(row)
        return comparison(row, ratios[row].pop(0) if len(ratios[row]) > 1 else ratios[row][0])

    monkeypatch.setattr(versus, "compare", compare)
    app = typer.Typer()
    app.command()(versus.main)
    done = CliRunner().invoke(app, [".", ".", *ratios, *bounds])
    assert done.exit_code == code, done.output
    assert len(calls) == measured
    assert "geometric mean" in done.output
    assert "lowest" in done.output


def test_the_baseline_is_of_24_workloads_and_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[str] = []

    def compare(before: Path, after: Path, row: str, *rest: object) -> versus.Comparison:
        rows.append(row)
        return comparison(row, 1.0)

    monkeypatch.setattr(versus, "compare", compare)
    app = typer.Typer()
    app.command()(versus.main)
    assert CliRunner().invoke(app, [".", ".", "--baseline"]).exit_code == 0
    assert len(rows) == len(set(rows)) == 24
    for row in rows:
        name, dtype = row.split("=")
        assert dtype in ("float32", "bfloat16", "int8")
        with torch.device("meta"):
            model = workloads.parse(name).build()
        assert sum(parameter.numel() for parameter in model.parameters()) < 200e6
