"""The report of `hf-cpu-accel quantize --report` about the loss by quantization: tables, JSON and a chart."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from hf_cpu_accel.cli.bench.drawings import bare
from hf_cpu_accel.cli.quantize.measure import LinearLosses
from hf_cpu_accel.cli.quantize.mix import Mix
from hf_cpu_accel.cli.tables import results_table
from hf_cpu_accel.measure.colors import EAGER_COLOR, OURS_COLOR, SLOWER_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORST = 8
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Report:
    """Losses of a model and its linears by quantization.

    Attributes:
        title: model and dtype.
        dtype: the dtype of the report; mixes may contain further dtypes.
        unit: unit of losses, `"nats"` or `"1 - cosine"`.
        measured: loss of the whole model in `dtype`, measured on the examples.
        linears: estimated losses of the linears.
        mixes: mixes of dtypes, from the smallest to the one with the least loss.
        chosen: the proposed mix; None if none was requested or none fits.
        asked: the requested limit as text; empty if none was requested.
    """

    title: str
    dtype: str
    unit: str
    measured: float
    linears: Sequence[LinearLosses]
    mixes: Sequence[Mix]
    chosen: Mix | None
    asked: str

    @property
    def estimated(self) -> float:
        """Return the estimated loss of the model in `dtype`: the sum over the linears."""
        return sum(linear.options[self.dtype].loss for linear in self.linears)

    def share(self, linear: LinearLosses) -> float:
        """Return the share of a linear in the estimated loss, 0 to 1."""
        return linear.options[self.dtype].loss / max(self.estimated, 1e-30)

    def exceptions(self) -> dict[str, str]:
        """Return {path: dtype} of the linears of the proposed mix whose dtype differs from that of the report."""
        chosen = {} if self.chosen is None else self.chosen.dtypes
        return {path: dtype for path, dtype in chosen.items() if dtype != self.dtype}

    def summary(self) -> str:
        """Return the measured and the estimated loss as a sentence."""
        return (
            f"loss of the outputs, {self.unit}: {self.measured:.3g} measured with the whole model in {self.dtype}; "
            f"{self.estimated:.3g} estimated as the sum over linears, each quantized alone (second order)"
        )


def kind(path: str) -> str:
    """Return the path of a linear with `*` for its numbers."""
    return _NUMBER.sub("*", path)


def kinds_table(report: Report) -> Table:
    """Return a table with one row per name of linears in all layers, the largest share of the loss first."""
    groups: dict[str, list[LinearLosses]] = defaultdict(list)
    for linear in report.linears:
        groups[kind(linear.path)].append(linear)
    table = results_table(["linears", "format", "MB", "mean error", "max error", "loss", "share"])
    for name, members in sorted(groups.items(), key=lambda group: -sum(map(report.share, group[1]))):
        options = [member.options[report.dtype] for member in members]
        forms = "/".join(sorted({option.form for option in options}))
        table.add_row(
            f"{name}  x{len(members)}" if len(members) > 1 else name,
            forms,
            f"{sum(option.nbytes for option in options) / 1e6:.2f}",
            f"{sum(option.error for option in options) / len(options):.2%}",
            f"{max(option.error for option in options):.2%}",
            f"{sum(option.loss for option in options):.3g}",
            f"{sum(map(report.share, members)):.1%}",
        )
    return table


def worst_table(report: Report) -> Table:
    """Return a table of the linears with the largest losses, with their losses in each dtype."""
    finer_dtypes = [dtype for dtype in report.linears[0].options if dtype != report.dtype]
    headings = ["largest losses", "error", "loss", "share", *(f"loss in {dtype}" for dtype in finer_dtypes)]
    table = results_table(headings)
    for linear in sorted(report.linears, key=report.share, reverse=True)[:_WORST]:
        option = linear.options[report.dtype]
        finer = [f"{linear.options[dtype].loss:.3g}" for dtype in finer_dtypes]
        share = f"{report.share(linear):.1%}"
        table.add_row(linear.path, f"{option.error:.2%}", f"{option.loss:.3g}", share, *finer)
    return table


def mix_table(report: Report) -> Table:
    """Return a table that compares all linears in one dtype with the proposed mix."""
    table = results_table(["dtypes of linears", "MB", f"loss, {report.unit}"])
    for dtype in report.linears[0].options:
        options = [linear.options[dtype] for linear in report.linears]
        nbytes, loss = sum(option.nbytes for option in options), sum(option.loss for option in options)
        table.add_row(f"all {dtype}", f"{nbytes / 1e6:.2f}", f"{loss:.3g}")
    if report.chosen is not None:
        counts = Counter(report.chosen.dtypes.values())
        name = ", ".join(f"{counts[dtype]} {dtype}" for dtype in report.linears[0].options if counts[dtype])
        table.add_row(
            f"{name}  ({report.asked})", f"{report.chosen.nbytes / 1e6:.2f}", f"{report.chosen.loss:.3g}"
        )
    return table


def write_json(path: Path, report: Report) -> None:
    """Write the report as JSON; pass its `dtypes` to `accelerate_for_cpu(model, dtypes=...)`."""
    document = {
        "title": report.title,
        "dtype": report.dtype,
        "unit": report.unit,
        "measured_loss": report.measured,
        "estimated_loss": report.estimated,
        "linears": [asdict(linear) for linear in report.linears],
        "asked": report.asked,
        "dtypes": report.exceptions(),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_picture(path: Path, report: Report) -> None:
    """Write a chart: on the left the share of each linear in the loss, on the right the loss of mixes over their sizes."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    names = list(dict.fromkeys(kind(linear.path) for linear in report.linears))
    figure = Figure(
        figsize=(12, 2.2 + 0.28 * max(len(names), 6)), dpi=150, layout="constrained", facecolor="white"
    )
    figure.suptitle(report.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(report.summary(), fontsize=6.5, color="#777777", x=0.01, ha="left")
    shares, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_shares(shares, report, names)
    _draw_curve(curve, report)
    figure.savefig(path)


def _draw_shares(axes: Axes, report: Report, names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    places = [(names.index(kind(linear.path)), _number(linear.path)) for linear in report.linears]
    layers = 1 + max(layer for _, layer in places)
    grid = [[float("nan")] * layers for _ in names]
    for linear, (row, layer) in zip(report.linears, places, strict=True):
        value = 100 * report.share(linear)
        old = grid[row][layer]
        grid[row][layer] = value if old != old else old + value
    image = axes.imshow(grid, aspect="auto", cmap="YlOrRd", vmin=0)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("layer", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"share of the loss in {report.dtype}, each linear quantized alone", fontsize=9, loc="left"
    )
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=0)
    bar.ax.set_title("%", fontsize=7)
    bar.outline.set_visible(False)


def _draw_curve(axes: Axes, report: Report) -> None:
    axes.plot(
        [mix.nbytes / 1e6 for mix in report.mixes], [mix.loss for mix in report.mixes], color=OURS_COLOR
    )
    for dtype in report.linears[0].options:
        options = [linear.options[dtype] for linear in report.linears]
        point = sum(option.nbytes for option in options) / 1e6, sum(option.loss for option in options)
        axes.plot(*point, "o", color=EAGER_COLOR)
        axes.annotate(f"all {dtype}", point, xytext=(5, 5), textcoords="offset points", fontsize=8)
    if report.chosen is not None:
        point = report.chosen.nbytes / 1e6, report.chosen.loss
        axes.plot(*point, "D", color=SLOWER_COLOR)
        axes.annotate(
            f"proposed: {report.asked}", point, xytext=(7, 7), textcoords="offset points", fontsize=8
        )
    axes.set_yscale("log")
    axes.margins(x=0.12, y=0.1)
    axes.set_xlabel("MB of packed linears", fontsize=8)
    axes.set_title(f"estimated loss, {report.unit}, of mixed dtypes", fontsize=9, loc="left")
    bare(axes)
    axes.tick_params(axis="y", labelsize=8)


def _number(path: str) -> int:
    """Return the number of the layer that a linear is in."""
    match = _NUMBER.search(path)
    return int(match.group()) if match else 0
