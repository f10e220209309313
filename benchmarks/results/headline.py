"""The README's table: the latest run of `benchmarks.headline`, on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import markdown_table
from benchmarks.results.store import Machine, Table

GROUP, TITLE = "Headline", "speedups over PyTorch (eager)"
COLUMNS = (
    "model",
    "PyTorch (eager)",
    "torch.compile",
    "rival",
    "hf_cpu_accel",
    "rival, quantized",
    "hf_cpu_accel, quantized",
)
# Of the README, whose caption names the rivals of the rows with other ones.
HEADINGS = (
    "",
    "PyTorch (eager)",
    "`torch.compile`",
    "OpenVINO *",
    "hf_cpu_accel",
    "OpenVINO int8 *",
    "hf_cpu_accel int8 *",
)
# By the first word of the row; OpenVINO for all others.
_RIVALS = {"Llama-3.2-1B": "llama.cpp", "GCN": "PyG, sparse"}


@dataclass(frozen=True)
class Row:
    """One model: its eager time or rate, and the speedups over it by column, without those that do not exist."""

    label: str
    eager: str
    speedups: dict[str, float]

    @property
    def rival(self) -> str:
        """The library in the columns of rivals."""
        return _RIVALS.get(self.label.split(",")[0], "OpenVINO")


def latest(machines: Sequence[Machine]) -> tuple[Machine, Table]:
    """Return the latest headline table and its machine.

    Raises:
        KeyError: no machine has one.
    """
    measured = [
        (machine, table)
        for machine in machines
        for table in machine.tables
        if (table.group, table.title) == (GROUP, TITLE)
    ]
    if not measured:
        raise KeyError(f"no machine has the table {TITLE!r}: run `python -m benchmarks.headline`")
    return max(measured, key=lambda pair: pair[1].date)


def rows(machines: Sequence[Machine]) -> list[Row]:
    """Return the rows of the latest table."""
    _, table = latest(machines)
    return [
        Row(
            label,
            eager,
            {
                column: float(cell.rstrip("x"))
                for column, cell in zip(COLUMNS[2:], cells, strict=True)
                if cell != "-"
            },
        )
        for label, eager, *cells in table.rows
    ]


def markdown(machines: Sequence[Machine]) -> str:
    """Return the table; the fastest number of each row is bold."""
    lines = []
    for row in rows(machines):
        best = max(row.speedups.values())
        cells = [_cell(row.speedups.get(column), best) for column in COLUMNS[2:]]
        lines.append((row.label, row.eager, *cells))
    return markdown_table(HEADINGS, lines)


def _cell(speedup: float | None, best: float) -> str:
    if speedup is None:
        return "n/a"
    text = f"{speedup:.1f}x" if speedup < 10 else f"{speedup:.0f}x"
    return f"**{text}**" if speedup == best else text
