"""How a run of the harness is shown: a table per workload, and markdown for RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.harness import Record
from hf_cpu_accel.cli.bench_report import milliseconds
from hf_cpu_accel.measure import speedup

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
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
        return (record.system, f"failed: {record.error}", *[""] * (len(_HEADINGS) - 2))
    seconds, ratio = record.timing.seconds, speedup(record.base, record.timing)
    peak = record.ready.get("added_peak_bytes")
    return (
        record.system,
        milliseconds(seconds.value),
        f"{milliseconds(seconds.low)}..{milliseconds(seconds.high)}",
        f"{ratio.value:.2f}x" + (" slower" if ratio.value < 1 else ""),
        f"{record.agreement.worst_cosine:.6f}",
        f"{record.agreement.max_relative_error:.1e}",
        f"{record.ready['first_result_seconds']:.2f}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
    )


def table(workload: str, records: Sequence[Record]) -> Table:
    """For the terminal."""
    out = Table(title=workload, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, show_edge=False)
    out.padding = (0, 1, 0, 0)
    for number, heading in enumerate(_HEADINGS):
        out.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for record in records:
        out.add_row(*(escape(cell) for cell in cells(record)))
    return out


def markdown(workload: str, records: Sequence[Record]) -> str:
    """The same table as a markdown section, with the probes that bracketed it."""
    lines = [f"### {workload}", "", _line(_HEADINGS), _line(["---", *["---:"] * (len(_HEADINGS) - 1)])]
    lines += [_line(cells(record)) for record in records]
    probes = next((record.probes for record in records if record.probes), ())
    if probes:
        lines += ["", f"Probe before and after: {'; '.join(probe_text(probe) for probe in probes)}."]
    return "\n".join(lines) + "\n"


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


def write_markdown(path: Path, text: str) -> None:
    """Replace what stands between the two marker lines of the file; the prose around them stays.

    Raises ValueError if the file has no such lines.
    """
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r}; add them where the tables should go")
    before, after = old.split(BEGIN, 1)[0], old.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n\n{text.rstrip()}\n\n{END}{after}", encoding="utf-8")


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"
