"""Compare a call of a model with and without acceleration for the page of a Space: times, rates, a chart and the plan."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from hf_cpu_accel.api import accelerate_for_cpu, explain
from hf_cpu_accel.measure.colors import EAGER_COLOR, OURS_COLOR
from hf_cpu_accel.measure.timing import Timing, interleaved, speedup
from hf_cpu_accel.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

EAGER, ACCELERATED = "PyTorch (eager)", "accelerated"

PLAN_COLUMNS = ("Module", "Runs as", "dtype")
# Descriptions of the structures of a plan; a structure without one is shown by its name.
_MEANINGS = {
    "linear": "a matrix product with weights packed for this CPU",
    "merged projections": "projections of the same input, such as query, key and value, as one matrix product",
    "linear + activation": "a matrix product and its activation in one op",
    "linear + residual + norm": "a matrix product, the residual sum and the norm in one op",
    "ffn": "both matrix products of a feed-forward block in one op",
    "attention": "fused attention in blocks that fit in the CPU cache",
    "encoder layer": "a fused transformer layer in one call",
    "decoder layer": "a fused layer in one call for each new token",
    "embeddings": "lookups of tokens and positions and their norm in one op",
    "rms norm": "a norm in one op",
    "layer norm": "a norm in one op",
    "group norm": "a norm in one op",
    "group norm + SiLU": "a norm and its activation in one op",
    "convolution": "a convolution with weights packed for this CPU",
    "convolution block": "convolution, norm and activation in one op",
    "conv1d as linear": "a convolution over time as one matrix product",
    "pointwise convolution as linear": "a 1 x 1 convolution as one matrix product",
    "KV cache": "the KV cache in fewer bytes",
    "greedy search and sampling": "the loop of generate with less overhead",
    "beam search": "the loop of beam search with less overhead",
    "continuous batching": "several sequences in one batch, on request",
}
# Descriptions of the messages of graph layers, before `, mean` or another reduction.
_MESSAGES = {
    "source rows": "rows of neighbors are reduced in place, without a copy per edge",
    "source rows x weight": "rows of neighbors are weighted and reduced in place, without a copy per edge",
    "custom messages": "messages of edges are reduced in one op",
}
_FIRST_TOKEN = "first token: "


class Pair(Generic[T]):
    """An original model and an accelerated copy.

    Args:
        model: a target of `accelerate_for_cpu` that can be copied.
        dtype: first dtype of the accelerated copy.

    Attributes:
        eager: the original model, which stays unchanged.
        accelerated: the accelerated copy.
    """

    def __init__(self, model: T, *, dtype: str = "auto") -> None:
        self.eager = model
        self.accelerated = accelerate_for_cpu(copy.deepcopy(model), dtype=dtype)
        self._dtype = dtype
        self._lock = threading.Lock()

    def use(self, dtype: str) -> Plan:
        """Switch the accelerated copy to `dtype` and return its plan. A new dtype packs the weights again.

        No call of the accelerated copy may run meanwhile.

        Raises:
            ValueError: `accelerate_for_cpu` does not accept the dtype.
        """
        with self._lock:
            if dtype != self._dtype:
                accelerate_for_cpu(self.accelerated, dtype=dtype)
                self._dtype = dtype
            return explain(self.accelerated)


@dataclass(frozen=True)
class Comparison:
    """Times of the same call with both models.

    Attributes:
        eager: seconds per call of the original model.
        accelerated: seconds per call of the accelerated copy, in the same rounds.
        amount: units of work per call, such as 64.
        unit: name of the unit, such as "sentences".
    """

    eager: Timing
    accelerated: Timing
    amount: float
    unit: str

    @property
    def seconds(self) -> tuple[float, float]:
        """Return the median seconds per call, eager and accelerated."""
        return self.eager.seconds.value, self.accelerated.seconds.value

    @property
    def rates(self) -> tuple[float, float]:
        """Return the units per second, eager and accelerated."""
        eager, accelerated = self.seconds
        return self.amount / eager, self.amount / accelerated

    @property
    def speedup(self) -> float:
        """Return the speedup: the median of per-round ratios."""
        return speedup(self.eager, self.accelerated).value

    def __str__(self) -> str:
        eager, accelerated = (format_seconds(seconds) for seconds in self.seconds)
        slower = " (slower)" if self.speedup < 1 else ""
        return f"Speedup {self.speedup:.2f}x{slower}: {accelerated} instead of {eager} for {self.amount:,g} {self.unit}"

    def chart(self) -> Figure:
        """Return a chart with two bars for the units per second, sized for a phone."""
        from matplotlib.figure import Figure  # not pyplot: no display, no global state

        figure = Figure(figsize=(4.4, 1.5), dpi=144, layout="constrained")
        axes = figure.subplots()
        axes.barh((EAGER, ACCELERATED), self.rates, color=(EAGER_COLOR, OURS_COLOR), height=0.6)
        for place, rate in enumerate(self.rates):
            axes.text(rate, place, f" {rate:,.0f}" if rate >= 100 else f" {rate:.3g}", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(self.rates))
        axes.set_title(f"{self.unit}/s (longer is better)", fontsize=10, loc="left")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_visible(False)  # the bars have their numbers
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        return figure


def compare_calls(
    eager: Callable[[], object],
    accelerated: Callable[[], object],
    *,
    amount: float,
    unit: str,
    rounds: int = 3,
    seconds: float = 0.0,
) -> Comparison:
    """Time both calls alternately, after a warm-up call of each.

    Args:
        eager: calls the original model.
        accelerated: makes the same call with the accelerated copy.
        amount: units of work per call.
        unit: name of the unit.
        rounds: number of bursts of calls.
        seconds: minimum seconds per burst.

    Raises:
        ValueError: the amount or the number of rounds is not positive.
    """
    _check_amount(amount)
    systems = {EAGER: eager, ACCELERATED: accelerated}
    timings = interleaved(systems, rounds=rounds, calls=1, seconds=seconds)
    return Comparison(timings[EAGER], timings[ACCELERATED], amount, unit)


def compare_seconds(eager: float, accelerated: float, *, amount: float, unit: str) -> Comparison:
    """Return the comparison of two calls that the caller timed, such as streamed answers.

    Args:
        eager: seconds of the call of the original model.
        accelerated: seconds of the call of the accelerated copy.
        amount: units of work per call.
        unit: name of the unit.

    Raises:
        ValueError: a time or the amount is not positive.
    """
    _check_amount(amount)
    if eager <= 0 or accelerated <= 0:
        raise ValueError(f"eager={eager}, accelerated={accelerated}: expected seconds above 0")
    return Comparison(Timing(((eager,),)), Timing(((accelerated,),)), amount, unit)


def plan_rows(plan: Plan) -> list[list[str]]:
    """Return rows for `PLAN_COLUMNS`, one per group of equal modules: the replaced ones, then those that were left."""
    kinds = Counter((item.structure, item.dtype, item.reason) for item in (*plan.replaced, *plan.left))
    return [
        [
            f"{count} x {structure}" if count > 1 else structure,
            meaning(structure) if reason is None else f"left: {reason}",
            "unchanged" if reason is not None else dtype,
        ]
        for (structure, dtype, reason), count in kinds.items()
    ]


def plan_sentence(plan: Plan) -> str:
    """Return a summary of the plan: numbers of modules, dtype, size of the packed weights, kernels and threads."""
    if not plan.items:
        return "Nothing is accelerated."
    kernels = (
        f"{plan.tier} kernels" if plan.kernels == "native" else "plain PyTorch ops, without native kernels"
    )
    size = f", {plan.packed_bytes / 1e6:.1f} MB of packed weights" if plan.packed_bytes else ""
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    modules = f"{len(plan.replaced)} modules replaced, {len(plan.left)} left"
    return f"{modules}; {plan.dtype}{size}; {kernels}, {threads}."


def meaning(structure: str) -> str:
    """Return the description of a structure of a plan, or its name if it has none."""
    if structure.startswith(_FIRST_TOKEN):
        return f"{meaning(structure.removeprefix(_FIRST_TOKEN))}, for the first token only"
    message, _, reduction = structure.rpartition(", ")
    if message in _MESSAGES:
        return f"{_MESSAGES[message]} ({reduction})"
    return _MEANINGS.get(structure, structure)


def format_seconds(seconds: float) -> str:
    """Format a time in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _check_amount(amount: float) -> None:
    if amount <= 0:
        raise ValueError(f"amount={amount}: expected a number above 0")
