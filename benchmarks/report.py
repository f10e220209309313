"""Tables of a run of the harness, one per workload, for the terminal and for the recorded results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import Record
from hf_cpu_accel.cli.tables import interval, milliseconds, ratio_text, results_table
from hf_cpu_accel.measure import speedup

_ERROR_WIDTH = 120  # the whole of it is in the JSON lines and in the log
HEADINGS = (
    "system",
    "median\nms",
    "95 %\ninterval",
    "speedup",
    "worst\ncosine",
    "max rel\nerror",
    "first\ns",
    "added\nMB",
)


def cells(record: Record) -> tuple[str, ...]:
    """Return one row: the numbers in the order of the headings, or the error."""
    if record.timing is None or record.base is None or record.agreement is None:
        error = textwrap.shorten(str(record.error), _ERROR_WIDTH, placeholder=" ...")
        return (record.system, f"failed: {error}", *[""] * (len(HEADINGS) - 2))
    seconds = record.timing.seconds
    peak = record.ready.get("added_peak_bytes")
    return (
        record.system,
        milliseconds(seconds.value),
        interval(seconds),
        ratio_text(speedup(record.base, record.timing).value),
        f"{record.agreement.worst_cosine:.6f}",
        f"{record.agreement.max_relative_error:.1e}",
        f"{record.ready['first_result_seconds']:.2f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
    )


def table(title: str, records: Sequence[Record]) -> Table:
    """Return the table for the terminal; failures are listed below the numbers, where they do not widen the columns."""
    failed = [record for record in records if record.timing is None]
    out = results_table(
        HEADINGS,
        title,
        "\n".join(f"{cells(record)[0]} {escape(cells(record)[1])}" for record in failed) or None,
    )
    for record in records:
        if record not in failed:
            out.add_row(*(escape(cell) for cell in cells(record)))
    return out


def note(records: Sequence[Any]) -> str:
    """Return the probes before and after the records of a run; empty without probes."""
    probes = next((record.probes for record in records if record.probes), ())
    return f"Probe before and after: {'; '.join(probe_text(probe) for probe in probes)}." if probes else ""


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown: numbers to the right, the first column to the left."""
    aligned = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(_line(row) for row in (headings, aligned, *rows))


def probe_text(probe: dict[str, float]) -> str:
    """Return the limits of the machine in one phrase."""
    return (
        f"{probe['float32']:.0f} GFLOP/s float32, {probe['bfloat16']:.0f} bfloat16, "
        f"{probe['int8']:.0f} GOP/s int8, {probe['read_bandwidth']:.0f} GB/s read"
    )


def setup(facts: Mapping[str, object], threads: int) -> str:
    """Return the machine in one phrase, from `environment()`."""
    kernels = f"{facts['kernels']} kernels" + (f", tier {facts['tier']}" if facts["tier"] else "")
    return f"{facts['cpu']}, {facts['cores']} cores, {threads} threads, {kernels}"


def versions(facts: Mapping[str, object]) -> str:
    """Return Python and packages in one phrase, from `environment()`."""
    packages = facts["versions"]
    assert isinstance(packages, dict)
    return ", ".join(
        [f"Python {facts['python']}", *(f"{name} {version}" for name, version in packages.items())]
    )


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"
