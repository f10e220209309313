"""The report of a run of the suites: rows of models, geometric means by family, and a chart of these."""

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
    def of(cls, case: Case, results: dict[str, dict[str, object]]) -> Row:
        """Return the row of a worker's results."""
        measured = {name: one for name, one in results.items() if "error" not in one}
        timings = {name: Timing(tuple(map(tuple, one["rounds"]))) for name, one in measured.items()}  # type: ignore[call-overload]
        base = timings[systems.BASE]
        return cls(
            case,
            {name: timing.seconds.value for name, timing in timings.items()},
            {name: speedup(base, timing).value for name, timing in timings.items()},
            {name: float(one["cosine"]) for name, one in measured.items()},  # type: ignore[arg-type]
            {name: str(one["error"]) for name, one in results.items() if "error" in one},
        )


@dataclass(frozen=True)
class Family:
    """The models of one family, or all.

    Attributes:
        models: how many.
        gains: of each system, those of the models that it could run.
    """

    name: str
    models: int
    gains: dict[str, list[float]]

    def mean(self, system: str) -> float | None:
        """Return the geometric mean; None if the system could run none of the models."""
        return statistics.geometric_mean(self.gains[system]) if self.gains[system] else None


def families(rows: Sequence[Row], chosen: Sequence[str]) -> list[Family]:
    """Return each family of each suite, and all together."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.case.suite}: {row.case.model.family}", []).append(row)
    groups["all"] = list(rows)
    return [
        Family(
            name,
            len(held),
            {
                system: [row.gains[system] for row in held if system in row.gains]
                for system in _others(chosen)
            },
        )
        for name, held in groups.items()
    ]


def headings(chosen: Sequence[str]) -> tuple[str, ...]:
    others = _others(chosen)
    cosines = [f"cosine {name}" for name in others if name.startswith("ours")]
    return ("model", "family", f"{systems.BASE}, ms", *others, *cosines)


def cells(row: Row, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the speedup of each other system over eager; "failed" where it could not be measured."""
    others = _others(chosen)
    gains = [f"{row.gains[name]:.2f}x" if name in row.gains else "failed" for name in others]
    cosines = [
        f"{row.cosines[name]:.6f}" if name in row.cosines else ""
        for name in others
        if name.startswith("ours")
    ]
    return (row.case.name, row.case.model.family, milliseconds(row.seconds[systems.BASE]), *gains, *cosines)


def family_headings(chosen: Sequence[str]) -> tuple[str, ...]:
    each = (heading for name in _others(chosen) for heading in (name, f"{name}, least"))
    return ("family", "models", *each)


def family_cells(family: Family) -> tuple[str, ...]:
    """Return the geometric mean and the minimum of each system's speedups, and its number of models if not all."""
    texts: list[str] = []
    for system, gains in family.gains.items():
        mean = family.mean(system)
        if mean is None:
            texts += ["failed", ""]
            continue
        of = "" if len(gains) == family.models else f" of {len(gains)}"
        texts += [f"{mean:.2f}x{of}", f"{min(gains):.2f}x"]
    return (family.name, str(family.models), *texts)


def draw(groups: Sequence[Family], path: Path) -> None:
    """Draw a bar for each family and system. Needs matplotlib."""
    from matplotlib.figure import Figure

    others = list(groups[0].gains)
    step = len(others) + 1
    figure = Figure(figsize=(7, 0.6 + len(groups) * (0.25 + 0.22 * len(others))), layout="constrained")
    axes = figure.add_subplot()
    for number, system in enumerate(others):
        means = [family.mean(system) or 0.0 for family in groups]
        at = [place * step + number for place in range(len(groups))]
        bars = axes.barh(at, means, height=0.9, label=system)
        axes.bar_label(bars, [f"{mean:.2f}x" for mean in means], padding=2, fontsize=8)
    middles = [place * step + (len(others) - 1) / 2 for place in range(len(groups))]
    axes.set_yticks(middles, [f"{family.name} ({family.models})" for family in groups])
    axes.axvline(1, linestyle=":", linewidth=1, color="black")
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as eager float32, geometric mean")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


def _others(chosen: Sequence[str]) -> list[str]:
    return [name for name in chosen if name != systems.BASE]
