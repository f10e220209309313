"""Speedups of this package over eager, the best rival and OpenVINO, per workload and precision."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.harness import Record
from benchmarks.systems import BASE
from hf_cpu_accel.cli.tables import milliseconds, ratio_text, results_table
from hf_cpu_accel.measure import speedup

HEADINGS = (
    "workload",
    "precision",
    "ours\nms",
    "to eager\nfp32",
    "best rival",
    "its\nms",
    "to best\nrival",
    "to\nOpenVINO",
)


@dataclass(frozen=True)
class Outcome:
    """The records of one interleaved run; `ours` is the name of this package's system."""

    precision: str
    ours: str
    records: Sequence[Record]

    @property
    def rivals(self) -> list[Record]:
        """Return the rivals that were measured, the fastest first."""
        measured = [r for r in self.records if r.system not in (BASE, self.ours) and r.timing is not None]
        return sorted(measured, key=_median)

    def over(self, prefix: str) -> float | None:
        """Return the speedup over the fastest rival with this prefix, paired in rounds; None without one."""
        return self._over(next((rival for rival in self.rivals if rival.system.startswith(prefix)), None))

    @property
    def over_eager(self) -> float | None:
        """Return the speedup over eager float32."""
        return self._over(self._named(BASE))

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of the summary."""
        ours, best = self._named(self.ours), next(iter(self.rivals), None)
        return (
            ours.workload,
            self.precision,
            "failed" if ours.timing is None else milliseconds(_median(ours)),
            ratio_text(self.over_eager),
            "-" if best is None else best.system,
            "-" if best is None else milliseconds(_median(best)),
            ratio_text(self.over("")),
            ratio_text(self.over("openvino")),
        )

    def _named(self, system: str) -> Record:
        return next(record for record in self.records if record.system == system)

    def _over(self, other: Record | None) -> float | None:
        ours = self._named(self.ours)
        if other is None or other.timing is None or ours.timing is None:
            return None
        return speedup(other.timing, ours.timing).value


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return one row per outcome, then the geometric means of the ratios per precision."""
    out = [outcome.row for outcome in outcomes]
    for precision in dict.fromkeys(outcome.precision for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.precision == precision]
        means = [
            _geometric_mean([outcome.over_eager for outcome in group]),
            _geometric_mean([outcome.over("") for outcome in group]),
            _geometric_mean([outcome.over("openvino") for outcome in group]),
        ]
        eager, best, openvino = (ratio_text(mean) for mean in means)
        out.append(("geometric mean", precision, "", eager, "", "", best, openvino))
    return out


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table for the terminal."""
    out = results_table(HEADINGS, title="Summary")
    for row in rows(outcomes):
        out.add_row(*row)
    return out


def _median(record: Record) -> float:
    assert record.timing is not None
    return record.timing.seconds.value


def _geometric_mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None
