"""The data file of a machine: for each table its latest run, with the command, the date and the versions.

A table is known by its group and its title; a run replaces the one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import cpuinfo

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """One table: `columns` are its headings, `rows` its cells as shown, `setup` is CPU, cores, threads and instruction set."""

    group: str
    title: str
    date: str
    command: str
    setup: str
    versions: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells in {row}, {len(self.columns)} columns")

    def cell(self, row: str, column: str) -> str:
        """Return the text in a column of the first row that begins with `row`. Raises KeyError for a missing row or column."""
        try:
            found = next(cells for cells in self.rows if cells[0] == row)
            return found[self.columns.index(column)]
        except (StopIteration, ValueError):
            raise KeyError(f"{self.title}: no cell {row!r}, {column!r}") from None


@dataclass(frozen=True)
class Machine:
    """The results of one machine. `key` is the name of its file."""

    key: str
    name: str
    about: str = ""
    tables: tuple[Table, ...] = field(default=())

    def table(self, title: str) -> Table:
        """Return the table with a title. Raises KeyError if there is none."""
        for table in self.tables:
            if table.title == title:
                return table
        raise KeyError(f"{self.key}: no table {title!r}")

    def with_table(self, table: Table) -> Machine:
        """Return a copy with this table instead of its older run, or after the other tables of its group."""
        places = [(old.group, old.title) for old in self.tables]
        tables = list(self.tables)
        if (table.group, table.title) in places:
            tables[places.index((table.group, table.title))] = table
        else:
            groups = [old.group for old in tables]
            end = len(groups) - groups[::-1].index(table.group) if table.group in groups else len(groups)
            tables.insert(end, table)
        return replace(self, tables=tuple(tables))


def machines(folder: Path = FOLDER) -> list[Machine]:
    """Return all machines that were measured, by their keys."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def load(path: Path) -> Machine:
    """Return the machine of a file. Raises OSError if it cannot be read."""
    data = json.loads(path.read_text(encoding="utf-8"))
    tables = [
        Table(**{**table, "columns": tuple(table["columns"]), "rows": tuple(map(tuple, table["rows"]))})
        for table in data["tables"]
    ]
    return Machine(path.stem, data["name"], data["about"], tuple(tables))


def save(machine: Machine, folder: Path) -> None:
    """Write its file, a line for each row, so that a change of one shows as one."""
    data = {"name": machine.name, "about": machine.about, "tables": [asdict(t) for t in machine.tables]}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    flat = re.sub(r"\[\s+(\"[^\[\]]*?\")\s+\]", lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text)
    (folder / f"{machine.key}.json").write_text(flat + "\n", encoding="utf-8")


def this_machine(folder: Path) -> Machine:
    """Return the results of this machine, without tables if it is new.

    Clouds call different CPUs by one name; family and model tell them apart.
    """
    info = cpuinfo.get_cpu_info()
    brand = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", "", info.get("brand_raw", "unknown"))
    family, model = info.get("family", 0), info.get("model", 0)
    words = re.findall(r"[a-z0-9]+", f"{brand} {family} {model}".lower())
    path = folder / f"{'-'.join(words)}.json"
    if path.exists():
        return load(path)
    return Machine(path.stem, f"{' '.join(brand.split())} (family {family}, model {model})")


def record(folder: Path, tables: Sequence[Table]) -> Machine:
    """Record tables measured on this machine. Raises OSError if its file cannot be written."""
    machine = this_machine(folder)
    for table in tables:
        machine = machine.with_table(table)
    save(machine, folder)
    return machine
