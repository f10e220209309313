"""The table, the JSON file and the chart of `hf-cpu-accel bench`."""

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
    "latency\nms",
    "95 %\ninterval",
    "speedup",
    "worst row\ncosine",
    "max rel\nerror",
    "peak\nMB",
    "ready\ns",
)
CHART_SUFFIXES = (".png", ".svg", ".pdf")


def table(results: Sequence[Result], title: str, caption: str) -> Table:
    """Return a table with one row per system, at most 80 columns wide; rows of systems slower than eager say "slower"."""
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
    """Return `context` (machine, workload, settings) and the `to_dict()` of each result, in seconds and bytes."""
    return {**context, "systems": [result.to_dict() for result in results]}


def write_json(path: Path, results: Sequence[Any], context: dict[str, object]) -> None:
    """Write `document(results, context)` as JSON."""
    path.write_text(json.dumps(document(results, context), indent=2) + "\n", encoding="utf-8")


def write_chart(path: Path, results: Sequence[Result], title: str, caption: str) -> None:
    """Write a chart of median latencies as horizontal bars with their intervals.

    Args:
        path: the file, whose suffix is one of `CHART_SUFFIXES`.
        results: the results of `measure.measure`.
        title: title of the chart.
        caption: text below the chart.
    """
    figure = open_figure(len(results), width=8, title=title, caption=caption)
    latency_bars(figure, results)
    figure.savefig(path)
