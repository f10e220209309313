"""The pages: one for each machine, the index benchmarks/RESULTS.md, and the part of the README between its marker lines."""

from __future__ import annotations

import re
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
Only ratios inside one table compare: clocks, memory and neighbors of a cloud machine move by tens of per cent between runs. How
the measurement is done and what the columns mean is told in [docs/how-to/benchmarking.md](../docs/how-to/benchmarking.md).

`make bench` and `make bench-peers` (nothing else running) put the tables of your machine here. Weights are random, so the accuracy
columns speak about rounding, not about tasks: for trained weights see `hf-cpu-accel demo`."""
_CAPTION = """\
{name}, {setup}; {versions}. Speedups are medians of per-round ratios over PyTorch (eager) in float32. The rival is OpenVINO in
float32 and int8. For Llama it is llama.cpp in bfloat16 and Q4_0, beside ours in bfloat16 and int4, over eager bfloat16. For GCN it
is PyTorch Geometric on a sparse matrix. Weights are random, shapes are real."""


def pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Every file that follows from the data of a folder, with its text; the index is beside the folder."""
    known = machines(folder)
    out = {folder / f"{machine.key}.md": machine_page(machine) for machine in known}
    if folder == FOLDER:
        out[INDEX] = index(known)
        out[README] = readme(README.read_text(encoding="utf-8"), known)
    return out


def write(folder: Path = FOLDER) -> list[Path]:
    """Write what has changed, and return it."""
    changed = []
    for path, text in pages(folder).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def readme(text: str, known: Sequence[Machine]) -> str:
    """The README with its numbers anew. Raises ValueError if it has no marker lines."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{numbers(known)}\n{END}{after}"


def numbers(known: Sequence[Machine]) -> str:
    """Return what the README shows: the table, and what was measured where."""
    machine, table = headline.latest(known)
    cores = table.setup.split(", ", 1)[1]
    packages = re.sub(r"^Python [\d.]+, ", "", table.versions)
    caption = _CAPTION.format(name=machine.name, setup=cores, versions=packages)
    return f"{headline.markdown(known)}\n\n{textwrap.fill(caption, 125, break_on_hyphens=False)}"


def index(known: Sequence[Machine]) -> str:
    """All machines, and the numbers of the README."""
    listed = "\n".join(f"- {_entry(machine)}" for machine in known)
    return (
        f"{_GENERATED}\n\n# Results\n\n{_INTRODUCTION}\n\n{listed}\n\n"
        "Earlier runs, and what was noted beside them, are in [history](history/2026-11.md).\n\n"
        f"## In short\n\n{numbers(known)}\n"
    )


def _entry(machine: Machine) -> str:
    latest = max((table.date[:10] for table in machine.tables), default="none")
    count = f"{len(machine.tables)} tables, the latest of {latest}"
    return f"[{machine.name}](results/{machine.key}.md): {count}. {machine.about}"


def machine_page(machine: Machine) -> str:
    """The latest run of each table of one machine."""
    parts = [f"{_GENERATED}\n\n# {machine.name}\n", f"{machine.about}\n"]
    for group, tables in groupby(machine.tables, lambda table: table.group):
        parts.append(f"## {group}\n")
        parts.extend(_section(table) for table in tables)
    return "\n".join(parts)


def _section(table: Table) -> str:
    facts = f"- {table.date}; {table.setup}\n- {table.versions}\n- `{table.command}`\n"
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n{facts}{note}\n{markdown_table(table.columns, table.rows)}\n"
