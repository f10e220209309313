"""Common parts of the kernel benchmarks: one cell per shape, dtype and provider, their tables, and a summary over a grid."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from hf_cpu_accel.cli.tables import results_table
from hf_cpu_accel.measure import Agreement, Timing, interleaved, speedup

OURS = "ours"
# Providers with this suffix do less than the whole job: shown, but not compared with ours.
PARTIAL = " *"
_HEADINGS = ("dtype", "provider", "us", "95 %\ninterval", "GFLOP/s", "% of\npeak", "rel\nerror")
_SUMMARY = (
    "dtype",
    "geomean\n% of peak",
    "worst\n% of peak",
    "at shape",
    "torch's best\ngeomean %",
    "torch / ours\ngeomean",
    "torch / ours\nworst",
    "at shape, against",
)


@dataclass(frozen=True)
class Cell:
    """One measurement. operations: of one call, a multiply-add is two. peak: GFLOP/s of the machine around it."""

    case: str
    dtype: str
    provider: str
    operations: float
    peak: float
    timing: Timing
    agreement: Agreement

    @property
    def rate(self) -> float:
        """Return GFLOP/s, for int8 GOP/s."""
        return 1e-9 * self.operations / self.timing.seconds.value

    @property
    def share(self) -> float:
        """Return the percentage of the peak."""
        return 100 * self.rate / self.peak


def measure(
    case: str,
    dtype: str,
    passes: Mapping[str, Callable[[], object]],
    agreement: Mapping[str, Agreement],
    *,
    layers: int,
    operations: float,
    peak_dtype: str,
    rounds: int,
    seconds: float,
) -> list[Cell]:
    """Time providers in turns; return a cell for each.

    Args:
        passes: by provider, calls of `layers` layers one after the other.
        operations: of one layer.
        peak_dtype: which peak the cells are a share of; it is measured before and after, and the higher one counts.
    """
    before = _peak(peak_dtype)
    timings = interleaved(passes, rounds=rounds, calls=1, seconds=seconds)
    peak = max(before, _peak(peak_dtype))
    return [
        Cell(case, dtype, provider, operations, peak, _per_layer(timing, layers), agreement[provider])
        for provider, timing in timings.items()
    ]


def table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a table with a row per cell of one case."""
    out = results_table(_HEADINGS, title)
    for cell in cells:
        seconds = cell.timing.seconds
        out.add_row(
            cell.dtype,
            cell.provider,
            f"{seconds.value * 1e6:.1f}",
            f"{seconds.low * 1e6:.0f}..{seconds.high * 1e6:.0f}",
            f"{cell.rate:.0f}",
            f"{cell.share:.0f}",
            f"{cell.agreement.max_relative_error:.1e}",
        )
    return out


def summary(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return for each dtype the share of the peak that ours reaches, and its ratio to torch's fastest op per shape.

    A ratio of times below 1 means that torch was faster there.
    """
    rows = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        pairs = [(ours, best) for ours, best in _pairs(cells) if ours.dtype == dtype]
        ratios = [speedup(best.timing, ours.timing).value for ours, best in pairs]
        worst = min((ours for ours, _ in pairs), key=lambda cell: cell.share)
        lowest, (where, rival) = min(zip(ratios, pairs, strict=True), key=lambda pair: pair[0])
        rows.append(
            (
                dtype,
                f"{statistics.geometric_mean(ours.share for ours, _ in pairs):.0f}",
                f"{worst.share:.0f}",
                worst.case,
                f"{statistics.geometric_mean(best.share for _, best in pairs):.0f}",
                f"{statistics.geometric_mean(ratios):.2f}",
                f"{lowest:.2f}",
                f"{where.case}, {rival.provider}",
            )
        )
    return rows


def summary_table(cells: Sequence[Cell]) -> Table:
    """Return `summary` as a table for the terminal."""
    out = results_table(_SUMMARY, "Summary of ours")
    for row in summary(cells):
        out.add_row(*row)
    return out


def _pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Return (ours, torch's fastest) of each shape and dtype."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.case, cell.dtype), []).append(cell)
    for group in groups.values():
        ours = next(cell for cell in group if cell.provider == OURS)
        whole = [cell for cell in group if cell is not ours and not cell.provider.endswith(PARTIAL)]
        yield ours, min(whole, key=lambda cell: cell.timing.seconds.value)


def _per_layer(timing: Timing, layers: int) -> Timing:
    return Timing(tuple(tuple(seconds / layers for seconds in calls) for calls in timing.rounds))


def _peak(dtype: str) -> float:
    return float(torch.ops.hf_cpu_accel.measure_flops(dtype, torch.get_num_threads()))
