"""The pages: one for each machine, the index benchmarks/RESULTS.md, and the part of the README between its marker lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.report import markdown_table
from benchmarks.results import headline
from benchmarks.results.store import FOLDER, Machine, Table, machines

INDEX = FOLDER.parent / "RESULTS.md"
README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
_GENERATED = "<!-- Written by `python -m benchmarks.results`; the numbers are in the JSON files of benchmarks/results/. -->"
_INTRODUCTION = """\
Compare ratios within one table only: clocks, memory and neighbors of a cloud machine change by tens of percent between runs.
[Benchmark](../docs/how-to/benchmarking.md) describes the method, [the workloads](README.md) the columns.

`make bench` and `make bench-peers` add the tables of your machine. Run nothing else meanwhile. Weights are random, so the accuracy
columns show rounding, not the accuracy of a task. For trained weights run `hf-cpu-accel demo`."""
_CAPTION = """\
Measured on {name}, {setup}. Speedups over PyTorch (eager) in float32, medians of per-round ratios. * Llama: llama.cpp in
bfloat16 and Q4_0 beside hf_cpu_accel in bfloat16 and int4, over eager bfloat16. GCN: PyTorch Geometric on a sparse matrix.
Weights are random, shapes are real. {versions}."""


def pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Return the text of every file that is generated from the data of a folder. The index is beside the folder."""
    known = machines(folder)
    out = {folder / f"{machine.key}.md": machine_page(machine) for machine in known}
    if folder == FOLDER:
        out[INDEX] = index(known)
        out[README] = readme(README.read_text(encoding="utf-8"), known)
    return out


def write(folder: Path = FOLDER) -> list[Path]:
    """Write the files that have changed, and return their paths."""
    changed = []
    for path, text in pages(folder).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def readme(text: str, known: Sequence[Machine]) -> str:
    """Return the README with the current numbers. Raises ValueError if it has no marker lines."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{numbers(known)}\n{END}{after}"


def numbers(known: Sequence[Machine]) -> str:
    """Return what the README shows: the table, and what was measured where."""
    machine, table = headline.latest(known)
    cores = table.setup.split(", ", 1)[1]
    caption = _CAPTION.format(name=machine.name, setup=cores, versions=table.versions)
    return f"{headline.markdown(known)}\n\n{textwrap.fill(caption, 125, break_on_hyphens=False)}"


def index(known: Sequence[Machine]) -> str:
    """Return the index: all machines, and the numbers of the README."""
    listed = "\n".join(f"- {_entry(machine)}" for machine in known)
    return (
        f"{_GENERATED}\n\n# Results\n\n{_INTRODUCTION}\n\n{listed}\n\n"
        "[History](history/2026-11.md) has earlier runs.\n\n"
        f"## Headline\n\n{numbers(known)}\n"
    )


def _entry(machine: Machine) -> str:
    latest = max((table.date[:10] for table in machine.tables), default="none")
    count = f"{len(machine.tables)} tables, the latest of {latest}"
    return f"[{machine.name}](results/{machine.key}.md): {count}. {machine.about}"


def machine_page(machine: Machine) -> str:
    """Return the page of one machine: the latest run of each table."""
    parts = [f"{_GENERATED}\n\n# {machine.name}\n", f"{machine.about}\n"]
    for group, tables in groupby(machine.tables, lambda table: table.group):
        parts.append(f"## {group}\n")
        parts.extend(_section(table) for table in tables)
    return "\n".join(parts)


def _section(table: Table) -> str:
    facts = f"- {table.date}; {table.setup}\n- {table.versions}\n- `{table.command}`\n"
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n{facts}{note}\n{markdown_table(table.columns, table.rows)}\n"
