"""How `hf-cpu-accel bench` shows its results: a table, JSON and a chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_cpu_accel.cli.bench_measure import EAGER, Result
from hf_cpu_accel.cli.tables import coloured_ratio, interval, milliseconds, results_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
EAGER_COLOUR, OURS_COLOUR, SLOWER_COLOUR = "#9aa5b1", "#2f7ebc", "#c0392b"


def table(results: Sequence[Result], title: str, caption: str) -> Table:
    """One row per system, 80 columns wide; a system slower than eager is named so in its own row."""
    out = results_table(_HEADINGS, title, caption)
    for result in results:
        eager = result.system == EAGER
        out.add_row(
            result.system,
            milliseconds(result.seconds.value),
            interval(result.seconds),
            "1.00x" if eager else coloured_ratio(result.speedup.value),
            "-" if eager else f"{result.agreement.worst_cosine:.6f}",
            "-" if eager else f"{result.agreement.max_relative_error:.1e}",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
            f"{result.ready_seconds:.2f}",
        )
    return out


def write_json(path: Path, results: Sequence[Any], context: dict[str, object]) -> None:
    """`context` (machine, workload, settings) and the `to_dict()` of each result; seconds and bytes."""
    document = {**context, "systems": [result.to_dict() for result in results]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_chart(path: Path, results: Sequence[Result], title: str, caption: str) -> None:
    """Median latency as horizontal bars with their intervals; the suffix is one of CHART_SUFFIXES."""
    figure = open_figure(len(results), width=8, title=title, caption=caption)
    axes = figure.subplots()
    medians = [result.seconds.value * 1e3 for result in results]
    errors = [
        [(result.seconds.value - result.seconds.low) * 1e3 for result in results],
        [(result.seconds.high - result.seconds.value) * 1e3 for result in results],
    ]
    colours = [
        EAGER_COLOUR if result.system == EAGER else SLOWER_COLOUR if result.slower else OURS_COLOUR
        for result in results
    ]
    places = range(len(results))
    axes.barh(
        places,
        medians,
        height=0.62,
        color=colours,
        xerr=errors,
        error_kw={"ecolor": "#333333", "elinewidth": 1, "capsize": 3},
    )
    reach = max(result.seconds.high for result in results) * 1e3
    for place, result in zip(places, results, strict=True):
        text = f"{milliseconds(result.seconds.value)} ms"
        if result.system != EAGER:
            text += f"   {result.speedup.value:.2f}x" + (" slower than eager" if result.slower else "")
        axes.text(result.seconds.high * 1e3 + reach * 0.015, place, text, va="center", fontsize=9)
    axes.set_yticks(list(places), [result.system for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, reach * (1.45 if any(result.slower for result in results) else 1.28))
    axes.set_xlabel("milliseconds per call, median and 95 % interval (shorter is better)", fontsize=8)
    bare(axes)
    figure.savefig(path)


def open_figure(bars: int, width: float, title: str, caption: str) -> Figure:
    """An empty figure, as high as so many horizontal bars need."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(width, 1.3 + 0.5 * bars), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(caption, fontsize=6.5, color="#777777", x=0.01, ha="left")
    return figure


def bare(axes: Axes) -> None:
    """Take away what does not carry numbers."""
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color="#bbbbbb")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.xaxis.grid(True, color="#e8e8e8")
    axes.set_axisbelow(True)
