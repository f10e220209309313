"""Charts with matplotlib, for the commands and the pages of the project: latencies as bars, and the roofline of a machine."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_cpu_accel.cli.bench.measure import EAGER, Result
from hf_cpu_accel.cli.tables import milliseconds
from hf_cpu_accel.measure.colors import EAGER_COLOR, OURS_COLOR, SLOWER_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A layer or a call on a roofline.

    Attributes:
        label: name in the legend.
        intensity: operations per byte of weights.
        rate: 10^9 operations per second.
        color: color of the point.
    """

    label: str
    intensity: float
    rate: float
    color: str = OURS_COLOR


def latency_bars(figure: Figure, results: Sequence[Result]) -> None:
    """Draw median latencies as horizontal bars with their intervals."""
    axes = figure.subplots()
    medians = [result.seconds.value * 1e3 for result in results]
    errors = [
        [(result.seconds.value - result.seconds.low) * 1e3 for result in results],
        [(result.seconds.high - result.seconds.value) * 1e3 for result in results],
    ]
    colors = [
        EAGER_COLOR if result.system == EAGER else SLOWER_COLOR if result.slower else OURS_COLOR
        for result in results
    ]
    places = range(len(results))
    axes.barh(
        places,
        medians,
        height=0.62,
        color=colors,
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
    axes.set_xlabel("latency in ms, median and 95 % interval (shorter is better)", fontsize=8)
    bare(axes)


def limits(
    axes: Axes,
    peaks: Mapping[str, tuple[float, str]],
    read: float,
    left: float = 0.5,
    right: float = 1000,
    names: str = "left",
) -> None:
    """Draw the limits of a machine: operations per second over operations per byte of weights (Williams et al. 2009).

    Args:
        axes: where to draw.
        peaks: {label: (10^9 operations per second, color)}.
        read: memory bandwidth in 10^9 bytes per second.
        left: left end of the lines in operations per byte.
        right: right end of the lines in operations per byte.
        names: end of a line at which its label stands, "left" or "right".
    """
    for label, (peak, color) in peaks.items():
        axes.plot([left, peak / read, right], [left * read, peak, peak], color=color, linewidth=1.5)
        place = 1.1 * left if names == "left" else right / 1.1
        axes.text(place, peak * 1.12, f"{peak:.0f} Gop/s, {label}", va="bottom", ha=names)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of weights")
    axes.set_ylabel("Gop/s")


def roofline(
    figure: Any, peaks: Mapping[str, tuple[float, str]], read: float, points: Sequence[Point]
) -> None:
    """Draw points under the limits of a machine; points with one label share a color and a legend entry."""
    axes = figure.add_axes((0.13, 0.13, 0.83, 0.72))
    left = min(0.5, *(point.intensity / 2 for point in points))
    right = max(1000.0, *(point.intensity * 2 for point in points))
    limits(axes, peaks, read, left, right, names="right")
    angle = {"rotation": math.degrees(math.atan(read)), "transform_rotates_text": True}
    axes.text(1.2 * left, 1.4 * read * left, f"{read:.0f} GB/s", rotation_mode="anchor", **angle)
    for label in dict.fromkeys(point.label for point in points):
        group = [point for point in points if point.label == label]
        axes.plot(
            [point.intensity for point in group],
            [point.rate for point in group],
            "o",
            color=group[0].color,
            markersize=5,
            alpha=0.8,
            label=label,
        )
    axes.legend(loc="lower left", bbox_to_anchor=(-0.1, 1.01), ncols=2, fontsize=8, frameon=False)
    axes.set_xlim(left, right)
    rates = [point.rate for point in points]
    axes.set_ylim(min(left * read, min(rates) / 2), 2.5 * max(*rates, *(peak for peak, _ in peaks.values())))


def open_figure(bars: int, width: float, title: str, caption: str) -> Figure:
    """Return an empty figure that is high enough for this number of horizontal bars."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(width, 1.3 + 0.5 * bars), dpi=150, layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if caption:
        figure.supxlabel(caption, fontsize=6.5, color="#777777", x=0.01, ha="left")
    return figure


def bare(axes: Axes) -> None:
    """Remove the parts of the axes that carry no numbers."""
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color="#bbbbbb")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.xaxis.grid(True, color="#e8e8e8")
    axes.set_axisbelow(True)


def svg(figure: Any, name: str) -> str:
    """Return the figure as an SVG element for a page, with text as text and without external files; ids begin with `name`."""
    import matplotlib

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    opening, rest = text.split(">", 1)
    return (
        re.sub(r' (?:width|height)="[^"]*"', "", opening) + ">" + rest
    )  # without a size it fills the width of the page
