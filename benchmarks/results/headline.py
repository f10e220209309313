"""The README's table: the few numbers that `headline.json` names, each looked up in the data of its machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import markdown_table
from benchmarks.results.store import FOLDER, HEADLINE, Machine, Table

DTYPES = ("float32", "bfloat16", "int8", "int4")
_SIGNS = "¹²³⁴⁵⁶⁷⁸⁹"  # for machines


@dataclass(frozen=True)
class Gain:
    """One measured form of a workload: its number as the data has it, and how many times as fast as eager that is."""

    value: str
    ratio: float


@dataclass(frozen=True)
class Row:
    """A workload. `eager` is None where its table tells ratios alone; `gains` are by dtype."""

    label: str
    machine: str
    unit: str
    eager: str | None
    gains: Mapping[str, Gain]

    @property
    def best(self) -> tuple[str, Gain]:
        """The fastest dtype, and its gain."""
        return max(self.gains.items(), key=lambda item: item[1].ratio)


def rows(machines: Sequence[Machine], folder: Path = FOLDER) -> list[Row]:
    """Raises KeyError if a number that the README shows is not in the data."""
    known = {machine.key: machine for machine in machines}
    picks = json.loads((folder / HEADLINE).read_text(encoding="utf-8"))
    return [_row(pick, known[pick["machine"]]) for pick in picks]


def markdown(rows: Sequence[Row], machines: Sequence[Machine]) -> str:
    """The table, a column for each dtype, and below it the machines, told apart by signs."""
    used = list(dict.fromkeys(row.machine for row in rows))
    headings = ["", "eager", *(f'`"{dtype}"`' for dtype in DTYPES)]
    cells = [
        (
            f"{row.label}, {row.unit} {_SIGNS[used.index(row.machine)]}",
            row.eager or "",
            *(_cell(row.gains.get(dtype)) for dtype in DTYPES),
        )
        for row in rows
    ]
    names = {machine.key: machine.name for machine in machines}
    legend = "; ".join(f"{_SIGNS[place]} {names[key]}" for place, key in enumerate(used))
    return f"{markdown_table(headings, cells)}\n\n{legend}."


def _cell(gain: Gain | None) -> str:
    return "" if gain is None else f"{gain.value} ({gain.ratio:.1f}x)"


def _row(pick: Mapping[str, Any], machine: Machine) -> Row:
    table = machine.table(pick["table"])
    eager = table.cell(*pick["eager"]["value"]) if "eager" in pick else None
    gains = {dtype: _gain(pick[dtype], table, eager, pick["unit"]) for dtype in DTYPES if dtype in pick}
    return Row(pick["label"], pick["machine"], pick["unit"], eager, gains)


def _gain(pick: Mapping[str, Any], table: Table, eager: str | None, unit: str) -> Gain:
    """`ratio` is where the table has one, the median of those inside the rounds; else that of the two numbers, of which `base` is
    another eager than the row's."""
    value = table.cell(*pick["value"])
    if "ratio" in pick:
        return Gain(value, float(table.cell(*pick["ratio"]).rstrip("x")))
    base = table.cell(*pick["base"]) if "base" in pick else eager
    assert base is not None
    slow, fast = float(base), float(value)
    return Gain(value, slow / fast if unit == "ms" else fast / slow)
