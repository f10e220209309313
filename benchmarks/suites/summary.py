"""What a run of the suites is told as: rows of models, geometric means by family, and a picture of these."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import systems
from benchmarks.suites.cases import Case
from hf_cpu_accel.cli.tables import milliseconds
from hf_cpu_accel.measure import Timing, speedup


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        seconds: of each system, the median of its bursts.
        gains: how many times as fast as eager each system is, the median of the rounds.
        cosines: of each system's answer to eager's.
        errors: of the systems that could not be measured.
    """

    case: Case
    seconds: dict[str, float]
    gains: dict[str, float]
    cosines: dict[str, float]
    errors: dict[str, str]

    @classmethod
    def of(cls, case: Case, told: dict[str, dict[str, object]]) -> Row:
        """Of what a worker has printed."""
        measured = {name: one for name, one in told.items() if "error" not in one}
        timings = {name: Timing(tuple(map(tuple, one["rounds"]))) for name, one in measured.items()}  # type: ignore[call-overload]
        base = timings[systems.BASE]
        return cls(
            case,
            {name: timing.seconds.value for name, timing in timings.items()},
            {name: speedup(base, timing).value for name, timing in timings.items()},
            {name: float(one["cosine"]) for name, one in measured.items()},  # type: ignore[arg-type]
            {name: str(one["error"]) for name, one in told.items() if "error" in one},
        )


def headings(chosen: Sequence[str]) -> tuple[str, ...]:
    others = [name for name in chosen if name != systems.BASE]
    return (
        "model",
        "family",
        f"{systems.BASE}, ms",
        *others,
        *(f"cosine {name}" for name in others if name.startswith("ours")),
    )


def cells(row: Row, chosen: Sequence[str]) -> tuple[str, ...]:
    """How many times as fast as eager each other system is; "failed" where it could not be measured."""
    others = [name for name in chosen if name != systems.BASE]
    gains = [f"{row.gains[name]:.2f}x" if name in row.gains else "failed" for name in others]
    cosines = [
        f"{row.cosines[name]:.6f}" if name in row.cosines else ""
        for name in others
        if name.startswith("ours")
    ]
    return (row.case.name, row.case.model.family, milliseconds(row.seconds[systems.BASE]), *gains, *cosines)


def families(rows: Sequence[Row], chosen: Sequence[str]) -> list[tuple[str, ...]]:
    """For each family, and for all: its models, and of each system the geometric mean and the least of the gains.

    A mean is of the models that the system could run; where it could not run some, their number is told.
    """
    others = [name for name in chosen if name != systems.BASE]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.case.suite}: {row.case.model.family}", []).append(row)
    return [_group(name, held, others) for name, held in (*groups.items(), ("all", list(rows)))]


def family_headings(chosen: Sequence[str]) -> tuple[str, ...]:
    others = [name for name in chosen if name != systems.BASE]
    return ("family", "models", *(heading for name in others for heading in (name, f"{name}, least")))


def _group(name: str, rows: Sequence[Row], others: Sequence[str]) -> tuple[str, ...]:
    told: list[str] = []
    for system in others:
        gains = [row.gains[system] for row in rows if system in row.gains]
        if not gains:
            told += ["failed", ""]
            continue
        of = "" if len(gains) == len(rows) else f" of {len(gains)}"
        told += [f"{statistics.geometric_mean(gains):.2f}x{of}", f"{min(gains):.2f}x"]
    return (name, str(len(rows)), *told)


def draw(rows: Sequence[Row], chosen: Sequence[str], path: Path) -> None:
    """A bar for each family and system; needs matplotlib."""
    from matplotlib.figure import Figure

    others = [name for name in chosen if name != systems.BASE]
    told = families(rows, chosen)
    figure = Figure(figsize=(7, 0.6 + len(told) * (0.25 + 0.22 * len(others))), layout="constrained")
    axes = figure.add_subplot()
    for number, system in enumerate(others):
        at = [place * (len(others) + 1) + number for place in range(len(told))]
        means = [_number(cells[2 + 2 * number]) for cells in told]
        bars = axes.barh(at, means, height=0.9, label=system)
        axes.bar_label(bars, [f"{mean:.2f}x" for mean in means], padding=2, fontsize=8)
    axes.set_yticks(
        [place * (len(others) + 1) + (len(others) - 1) / 2 for place in range(len(told))],
        [f"{cells[0]} ({cells[1]})" for cells in told],
    )
    axes.axvline(1, linestyle=":", linewidth=1, color="black")
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as eager float32, geometric mean")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def _number(cell: str) -> float:
    return 0.0 if cell == "failed" else float(cell.split("x")[0])
