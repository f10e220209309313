"""Render `page.html` with the results of a report, as one file without external parts."""

from __future__ import annotations

from importlib import resources
from typing import Any

from hf_cpu_accel.cli.bench import drawings
from hf_cpu_accel.cli.bench.drawings import Point
from hf_cpu_accel.cli.report.advice import advice
from hf_cpu_accel.cli.report.layers import largest, total
from hf_cpu_accel.cli.report.measure import Report
from hf_cpu_accel.cli.tables import milliseconds, ratio_text
from hf_cpu_accel.measure.colors import EAGER_COLOR, OURS_COLOR, SLOWER_COLOR
from hf_cpu_accel.measure.generation_cost import peak_of
from hf_cpu_accel.plan_tree import tree

_SIZE = (4.6, 4.0)  # inches, so that text is readable on a phone


def page(report: Report, facts: dict[str, object], caption: str) -> str:
    """Return the page as HTML.

    Args:
        report: the results.
        facts: the facts of `measure.environment.environment()`.
        caption: the text of `measure.environment.summary()`.
    """
    from jinja2 import Environment

    template = resources.files("hf_cpu_accel.cli.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(ms=lambda estimate: milliseconds(estimate.value), ratio=ratio_text)
    slowest = largest(report.layers, lambda layer: max(layer.before.value, layer.after.value))  # type: ignore[union-attr]
    return environment.from_string(template).render(
        report=report,
        best=next(result for result in report.results if result.system == report.dtype),
        facts=facts,
        caption=caption,
        advice=advice(report),
        tree=tree(report.plan.items),
        latency=_latency(report),
        roofline=_roofline(report),
        width=lambda estimate: f"{100 * estimate.value / max(slowest, 1e-12):.2f}",
        before=total(report.layers, "before"),
        after=total(report.layers, "after"),
        colors={"eager": EAGER_COLOR, "ours": OURS_COLOR, "slower": SLOWER_COLOR},
    )


def _latency(report: Report) -> str:
    figure = drawings.open_figure(len(report.results), width=5, title="", caption="")
    drawings.latency_bars(figure, report.results)
    return drawings.svg(figure, "latency")


def _roofline(report: Report) -> str:
    """Return the roofline as SVG; empty without peaks, or without layers that multiply matrices."""
    from matplotlib.figure import Figure

    layers = [layer for layer in report.layers if layer.operations and layer.after is not None]
    if report.peaks is None or not layers:
        return ""
    limits = {
        f"peak {label}": (peak, color)
        for label, peak, color in (
            ("float32", report.peaks.float32, EAGER_COLOR),
            (report.dtype, peak_of(report.peaks, report.dtype), OURS_COLOR),
        )
    }
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    points = [
        Point(layer.kind, layer.intensity, layer.rate, _COLORS[kinds.index(layer.kind) % len(_COLORS)])
        for layer in layers
    ]
    figure: Any = Figure(figsize=_SIZE)
    drawings.roofline(figure, limits, report.peaks.read_bandwidth, points)
    return drawings.svg(figure, "roofline")


_COLORS = ("#0b5c99", "#7b341e", "#2f855a", "#6b46c1", "#b7791f", "#c53030")
