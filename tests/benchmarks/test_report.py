"""How a run is shown."""

from rich.console import Console

from benchmarks import report
from benchmarks.harness import Record
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


def test_slower_and_failed_systems_are_shown_as_such() -> None:
    failed = Record("bert-tiny:1x8", "ours-int8", error="ours-int8: ValueError: a | b")
    records = [record("eager-fp32", 0.2), record("ours-fp32", 0.25), failed]
    text = report.markdown_table(report.HEADINGS, [report.cells(each) for each in records])
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines()}) == 1
    assert "0.80x slower" in text
    assert "failed: ours-int8: ValueError: a \\| b" in text
    assert "346 GFLOP/s float32" in report.note(records)
    assert report.note([failed]) == ""


def test_records_become_json_values() -> None:
    fields = record("ours-fp32", 0.1).to_dict()
    assert fields["speedup"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert fields["probes"] == [_PROBE, _PROBE]
    assert Record("w", "s", error="died").to_dict() == {"workload": "w", "system": "s", "error": "died"}


def test_a_long_error_does_not_widen_the_table() -> None:
    failed = Record("bert-tiny:1x8", "torchao-int8", error="RuntimeError: " + "no such instruction\n" * 50)
    assert len(" ".join(report.cells(failed))) < 180
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report.table("bert-tiny:1x8", [record("eager-fp32", 0.2), failed]))
    assert "torchao-int8 failed: RuntimeError: no such instruction" in capture.get()
    assert "0.999910" in capture.get()
