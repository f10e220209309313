"""Comparisons with eager at few rows, of first calls, and of two checkouts, each on a tiny model."""

from pathlib import Path

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


def test_a_checkout_beside_itself(tmp_path):
    found = versus.ratios(ROOT, ROOT, "bert-tiny:1x8=float32", tmp_path, rounds=2, seconds=0.0)
    assert len(found) == 2
    assert all(ratio > 0 for ratio in found)
