"""How `hf-cpu-accel bench` shows its results: a table, JSON and a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_cpu_accel.cli.bench.drawings import latency_bars, open_figure
from hf_cpu_accel.cli.bench.measure import EAGER, Result
from hf_cpu_accel.cli.tables import colored_ratio, interval, milliseconds, results_table

_HEADINGS = (
    "system",
    "median\nms",
    "95 %\ninterval",
    "speedup",
    "worst row\ncosine",
    "max rel\nerror",
    "peak\nMB",
    "ready\ns",
)
CHART_SUFFIXES = (".png", ".svg", ".pdf")


def table(results: Sequence[Result], title: str, caption: str) -> Table:
    """One row per system, 80 columns wide; a system slower than eager is named so in its own row."""
    out = results_table(_HEADINGS, title, caption)
    for result in results:
        eager = result.system == EAGER
        out.add_row(
            result.system,
            milliseconds(result.seconds.value),
            interval(result.seconds),
            "1.00x" if eager else colored_ratio(result.speedup.value),
            "-" if eager else f"{result.agreement.worst_cosine:.6f}",
            "-" if eager else f"{result.agreement.max_relative_error:.1e}",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
            f"{result.ready_seconds:.2f}",
        )
    return out


def document(results: Sequence[Any], context: dict[str, object]) -> dict[str, object]:
    """`context` (machine, workload, settings) and the `to_dict()` of each result, as plain values; seconds and bytes."""
    return {**context, "systems": [result.to_dict() for result in results]}


def write_json(path: Path, results: Sequence[Any], context: dict[str, object]) -> None:
    """What `document` gives."""
    path.write_text(json.dumps(document(results, context), indent=2) + "\n", encoding="utf-8")


def write_chart(path: Path, results: Sequence[Result], title: str, caption: str) -> None:
    """Median latency as horizontal bars with their intervals; the suffix is one of CHART_SUFFIXES."""
    figure = open_figure(len(results), width=8, title=title, caption=caption)
    latency_bars(figure, results)
    figure.savefig(path)
