"""The charts of the site, from the data: speedups over eager, and the roofline of a machine; each light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import headline
from benchmarks.results.store import FOLDER, Machine, machines
from hf_cpu_accel.cli.bench.drawings import limits

FIGURES = FOLDER.parents[1] / "docs" / "figures"
# Text and lines, then float32, bfloat16, int8, int4.
_THEMES = {
    "light": ("#1f2933", ("#9fb3c8", "#4098d7", "#0b5c99", "#7b341e")),
    "dark": ("#e4e7eb", ("#829ab1", "#62b0e8", "#b3d9f7", "#f7c59f")),
}
_WIDTH = 4.4  # inches, shown at the width of a phone: text is drawn as large as it has to be there
_SIZE = 10
_DTYPES = ("float32", "bfloat16", "int8", "int4")
_ABOVE, _BESIDE = (8, 7), (-7, -4)  # where a label stands by its point


def write(folder: Path = FIGURES) -> list[Path]:
    """Draw all charts. Needs matplotlib."""
    known = machines()
    written = []
    for theme in _THEMES:
        for name, draw in (("speedups", speedups), ("roofline", roofline)):
            path = folder / f"{name}-{theme}.svg"
            _save(draw, known, theme, path)
            written.append(path)
    return written


def speedups(figure: Any, known: Sequence[Machine], colors: Sequence[str]) -> None:
    """Draw three bars for each row of the headline table: `torch.compile`, the faster rival, and the faster of ours."""
    bars = [(row, _bars(row)) for row in headline.rows(known)]
    most = max(max(pairs.values()) for _, pairs in bars)
    figure.set_size_inches(5.4, 0.35 + 0.62 * len(bars))
    axes = figure.add_axes((0.02, 0.06, 0.96, 0.93))
    place = 0.0
    for row, pairs in bars:
        axes.text(0, place, row.label, va="center", weight="bold")
        for name, ratio in pairs.items():
            place += 1
            axes.barh(place, ratio, height=0.9, color=colors[list(_SERIES).index(name)])
            shown = row.rival if name == "rival" else name
            axes.text(ratio + 0.012 * most, place, f"{ratio:.1f}x {shown}", va="center")
        place += 1.4
    axes.axvline(1, linewidth=1, linestyle=":", color=figure.text_color, alpha=0.5, zorder=0)
    axes.text(1.1, place - 0.3, "PyTorch (eager) = 1", va="center", style="italic")
    axes.set_xlim(0, most * 1.45)
    axes.set_ylim(place + 0.3, -0.8)
    axes.axis("off")


# Names of the bars, and the columns of the headline table that each is the best of.
_SERIES = {
    "torch.compile": ("torch.compile",),
    "rival": ("rival", "rival, quantized"),
    "hf_cpu_accel": ("hf_cpu_accel", "hf_cpu_accel, quantized"),
}


def _bars(row: headline.Row) -> dict[str, float]:
    best = {
        name: max((row.speedups[column] for column in columns if column in row.speedups), default=0.0)
        for name, columns in _SERIES.items()
    }
    return {name: ratio for name, ratio in best.items() if ratio}


def roofline(figure: Any, known: Sequence[Machine], colors: Sequence[str]) -> None:
    """Draw GPT-2 under the limits of the machine: operations/s over operations per byte of weights (Williams et al. 2009)."""
    table = next(m for m in known if m.key == "intel-xeon").table("gpt2, 128 + 64 tokens")
    probe = re.match(
        r"Probe before and after: (\d+) GFLOP/s float32, (\d+) bfloat16, (\d+) GOP/s int8, (\d+) GB/s",
        table.note,
    )
    assert probe is not None
    float32, _, int8, read = (float(number) for number in probe.groups())
    figure.set_size_inches(_WIDTH, 4.2)
    axes = figure.add_axes((0.13, 0.12, 0.83, 0.85))
    limits(axes, {"float32": (float32, colors[0]), "int8": (int8, colors[2])}, read)
    axes.text(0.62, read * 1.15, f"{read:.0f} GB/s", rotation=42, rotation_mode="anchor")
    tokens = 128  # of the prompt: each byte of a weight serves all of them
    for system, bits, peak in (("ours-bf16", 16, float32), ("ours-int8", 8, int8), ("ours-int4", 4.25, int8)):
        intensity, dtype = 2 * 8 / bits, {16: "bfloat16", 8: "int8"}.get(bits, "int4")
        share = float(table.cell(system, "of memory").rstrip("%")) / 100
        around = float(table.cell(system, "GB/s around"))
        of_peak = float(table.cell(system, "of peak").rstrip("%")) / 100
        color = colors[_DTYPES.index(dtype)]
        for x, y, name, offset, side in (
            (intensity, share * around * intensity, "a token", (7, -4), "left"),
            (intensity * tokens, of_peak * peak, "a prompt", _ABOVE if dtype == "int4" else _BESIDE, "right"),
        ):
            axes.plot(x, y, "o", color=color)
            axes.annotate(f"{dtype}, {name}", (x, y), xytext=offset, textcoords="offset points", ha=side)
    axes.set_xlim(0.5, 1000)
    axes.set_ylim(10, 3000)


def _save(draw: Callable[..., None], known: Sequence[Machine], theme: str, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    text, colors = _THEMES[theme]
    style = {
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text
        ),
        "font.size": _SIZE,
        "font.family": "sans-serif",
        "svg.fonttype": "none",  # letters as letters: they can be searched and read out
        "svg.hashsalt": path.name,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        figure: Any = Figure()
        figure.text_color = text
        draw(figure, known, colors)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
