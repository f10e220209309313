"""How a run of the harness is shown: a table per workload, and markdown for RESULTS.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from benchmarks.harness import Record
from hf_cpu_accel.cli.tables import interval, milliseconds, ratio_text, results_table
from hf_cpu_accel.measure import speedup

_ERROR_WIDTH = 120  # the whole of it is in the JSON lines and in the log
_HEADINGS = (
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
    """One row: the numbers in the order of the headings, or the error."""
    if record.timing is None or record.base is None or record.agreement is None:
        error = textwrap.shorten(str(record.error), _ERROR_WIDTH, placeholder=" ...")
        return (record.system, f"failed: {error}", *[""] * (len(_HEADINGS) - 2))
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
    """For the terminal; what failed is told below the numbers, where it does not widen their columns."""
    failed = [record for record in records if record.timing is None]
    out = results_table(
        _HEADINGS,
        title,
        "\n".join(f"{cells(record)[0]} {escape(cells(record)[1])}" for record in failed) or None,
    )
    for record in records:
        if record not in failed:
            out.add_row(*(escape(cell) for cell in cells(record)))
    return out


def markdown(title: str, records: Sequence[Record]) -> str:
    """The same table as a markdown section, with the probes that bracketed it."""
    text = f"### {title}\n\n{markdown_table(_HEADINGS, [cells(record) for record in records])}\n"
    probes = next((record.probes for record in records if record.probes), ())
    if probes:
        text += f"\nProbe before and after: {'; '.join(probe_text(probe) for probe in probes)}.\n"
    return text


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right, the first column to the left."""
    aligned = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(_line(row) for row in (headings, aligned, *rows))


def probe_text(probe: dict[str, float]) -> str:
    """The limits of the machine in one phrase."""
    return (
        f"{probe['float32']:.0f} GFLOP/s float32, {probe['bfloat16']:.0f} bfloat16, "
        f"{probe['int8']:.0f} GOP/s int8, {probe['read_bandwidth']:.0f} GB/s read"
    )


def heading(facts: dict[str, object], command: str, threads: int) -> str:
    """Date, machine, versions and command, as the opening of a run's section."""
    versions = facts["versions"]
    assert isinstance(versions, dict)
    kernels = f"{facts['kernels']} kernels" + (f", tier {facts['tier']}" if facts["tier"] else "")
    return (
        f"## {facts['date']}\n\n"
        f"- CPU: {facts['cpu']}, {facts['cores']} cores, {threads} threads, {kernels}\n"
        f"- Versions: Python {facts['python']}, " + ", ".join(f"{k} {v}" for k, v in versions.items()) + "\n"
        f"- Command: `{command}`\n"
    )


def around_section(path: Path, section: str) -> tuple[str, str]:
    """What stands before and after a section of the file, its marker lines included.

    Raises OSError if the file cannot be read, ValueError if it has no such lines.
    """
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    old = path.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{path} has no lines {begin!r} and {end!r}; add them where the tables should go")
    return old.split(begin, 1)[0] + begin, end + old.split(end, 1)[1]


def write_markdown(path: Path, text: str, section: str) -> None:
    """Replace what stands between the two marker lines of a section of the file; raises as `around_section`."""
    before, after = around_section(path, section)
    path.write_text(f"{before}\n\n{text.rstrip()}\n\n{after}", encoding="utf-8")


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"
