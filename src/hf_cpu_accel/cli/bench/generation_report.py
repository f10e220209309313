"""The table and the chart of `hf-cpu-accel bench --task text-generation`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from hf_cpu_accel.cli.bench.drawings import bare, open_figure
from hf_cpu_accel.cli.bench.generation_measure import Result
from hf_cpu_accel.cli.tables import colored_ratio, milliseconds, results_table
from hf_cpu_accel.measure.colors import EAGER_COLOR, OURS_COLOR, SLOWER_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADINGS = (
    "system",
    "prefill\ntokens/s",
    "of peak\nFLOP/s",
    "decode\ntokens/s",
    "of peak\nGB/s",
    "decode\nspeedup",
    "TTFT\nms",
    "peak\nMB",
)


def table(results: Sequence[Result], title: str, caption: str) -> Table:
    """Return a table with one row per system, at most 80 columns wide."""
    out = results_table(_HEADINGS, title, caption)
    for result in results:
        out.add_row(
            result.system,
            rate(result.prefill),
            share(result.flops_share),
            rate(result.decode),
            share(result.read_share),
            colored_ratio(result.step_speedup.value),
            milliseconds(result.first.value),
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}",
        )
    return out


def rate(per_second: float) -> str:
    """Format a rate with up to three significant digits."""
    return f"{per_second:.{0 if per_second >= 100 else 1 if per_second >= 10 else 2}f}"


def share(value: float | None) -> str:
    """Format a share of a measured limit in percent; `-` if there is no limit."""
    return "-" if value is None else f"{value:.0%}"


def write_chart(path: Path, results: Sequence[Result], title: str, caption: str) -> None:
    """Write a chart of tokens/s in decode and prefill as horizontal bars, with marks at the limits of the machine.

    Args:
        path: the file, whose suffix is one of `report.CHART_SUFFIXES`.
        results: the results of `generation_measure.measure`.
        title: title of the chart.
        caption: text below the chart.
    """
    figure = open_figure(len(results), width=10, title=title, caption=caption)
    decode, prefill = figure.subplots(1, 2, sharey=True)
    _bars(
        decode,
        results,
        [result.decode for result in results],
        [result.read_share for result in results],
        [result.step_speedup.value for result in results],
        "decode, tokens/s (mark: limit by memory bandwidth)",
    )
    _bars(
        prefill,
        results,
        [result.prefill for result in results],
        [result.flops_share for result in results],
        [result.first_speedup.value for result in results],
        "prefill, tokens/s (mark: limit by peak FLOP/s)",
    )
    decode.set_yticks(range(len(results)), [result.system for result in results])
    decode.invert_yaxis()
    figure.savefig(path)


def _bars(
    axes: Axes,
    results: Sequence[Result],
    rates: Sequence[float],
    shares: Sequence[float | None],
    speedups: Sequence[float],
    label: str,
) -> None:
    colors = [
        EAGER_COLOR if result.eager else SLOWER_COLOR if ratio < 1 else OURS_COLOR
        for result, ratio in zip(results, speedups, strict=True)
    ]
    axes.barh(range(len(results)), rates, height=0.62, color=colors)
    limits = [rate / share for rate, share in zip(rates, shares, strict=True) if share]
    reach = max([*rates, *limits])
    for place, (result, value, limit, ratio) in enumerate(zip(results, rates, shares, speedups, strict=True)):
        if limit:
            axes.plot([value / limit] * 2, [place - 0.31, place + 0.31], color="#333333", linewidth=1.5)
        text = rate(value) + ("" if result.eager else f"   {ratio:.2f}x")
        inside = limit is not None and value / limit < value + 0.3 * reach
        axes.text(
            (value / limit if inside and limit else value) + reach * 0.02,
            place,
            text,
            va="center",
            fontsize=9,
        )
    axes.set_xlim(0, reach * 1.35)
    axes.set_xlabel(label, fontsize=8)
    bare(axes)
