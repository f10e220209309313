"""Tables and markdown for RESULTS.md."""

from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks import report
from benchmarks.harness import Record
from benchmarks.session import check_markdown
from hf_cpu_accel.measure import Agreement, Timing

_PROBE = {"float32": 346.0, "bfloat16": 172.0, "int8": 1380.0, "read_bandwidth": 41.5, "threads": 2}


def record(system: str, seconds: float) -> Record:
    ready = {"first_result_seconds": 1.5, "added_peak_bytes": 440_000_000, "threads": 2, "model_bytes": 1}
    return Record(
        "bert-tiny:1x8",
        system,
        timing=Timing(((seconds,),) * 6),
        base=Timing(((0.2,),) * 6),
        agreement=Agreement(0.99991, 1e-3),
        ready=ready,
        probes=(_PROBE, _PROBE),
    )


def test_markdown_shows_slower_and_failed_systems() -> None:
    failed = Record("bert-tiny:1x8", "ours-int8", error="ours-int8: ValueError: a | b")
    text = report.markdown("bert-tiny:1x8", [record("eager-fp32", 0.2), record("ours-fp32", 0.25), failed])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "0.80x slower" in text
    assert "failed: ours-int8: ValueError: a \\| b" in text
    assert "346 GFLOP/s float32" in text


def test_records_become_json_values() -> None:
    fields = record("ours-fp32", 0.1).to_dict()
    assert fields["speedup"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert fields["probes"] == [_PROBE, _PROBE]
    assert Record("w", "s", error="died").to_dict() == {"workload": "w", "system": "s", "error": "died"}


def test_only_the_measured_part_of_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    begin, end = "<!-- measured: begin -->", "<!-- measured: end -->"
    other = "<!-- rivals: begin -->\nkept\n<!-- rivals: end -->\n"
    path.write_text(f"# Results\n{begin}\nold\n{end}\nprose\n{other}")
    report.write_markdown(path, "new\n", "measured")
    assert path.read_text() == f"# Results\n{begin}\n\nnew\n\n{end}\nprose\n{other}"
    with pytest.raises(ValueError, match="absent: begin"):
        report.write_markdown(path, "new", "absent")


def test_a_long_error_does_not_widen_the_table() -> None:
    failed = Record("bert-tiny:1x8", "torchao-int8", error="RuntimeError: " + "no such instruction\n" * 50)
    assert len(report.markdown("bert-tiny:1x8", [failed]).splitlines()[4]) < 180
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report.table("bert-tiny:1x8", [record("eager-fp32", 0.2), failed]))
    assert "torchao-int8 failed: RuntimeError: no such instruction" in capture.get()
    assert "0.999910" in capture.get()


def test_a_file_without_a_place_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="nowhere"):
        check_markdown(tmp_path / "nowhere.md", "measured")
    path = tmp_path / "RESULTS.md"
    path.write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    check_markdown(path, "measured")
    with pytest.raises(typer.BadParameter, match="absent: begin"):
        check_markdown(path, "absent")
