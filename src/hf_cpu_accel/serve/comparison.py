"""The same call with and without acceleration, for people to look at: times, rates, a chart, and the plan in plain words."""

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

EAGER, ACCELERATED = "PyTorch as it is", "accelerated"

PLAN_COLUMNS = ("Part of the model", "What became of it", "Numbers")
_NUMBERS = {
    "float32": "32-bit floats",
    "bfloat16": "16-bit floats",
    "int8": "8-bit integers",
    "int8-static": "8-bit integers, images too",
    "int8-weight": "8-bit integers, inputs in 16 bits",
    "int4": "4-bit integers",
}
# What a structure of a plan means to readers who do not know its name; others are shown by their name alone.
_MEANINGS = {
    "linear": "one matrix product with weights packed for this CPU",
    "merged projections": "products of the same input, such as query, key and value, done as one",
    "linear + activation": "a matrix product and its activation in one pass",
    "linear + residual + norm": "a matrix product, the sum with its input and the normalization in one pass",
    "ffn": "both matrix products of a feed-forward block in one pass",
    "attention": "attention in blocks that stay in the cache",
    "encoder layer": "a whole transformer layer in one call",
    "decoder layer": "a whole layer in one call for each new token",
    "embeddings": "lookups of words and positions, and their normalization, in one pass",
    "rms norm": "a normalization in one pass",
    "layer norm": "a normalization in one pass",
    "group norm": "a normalization in one pass",
    "group norm + SiLU": "a normalization and its activation in one pass",
    "convolution": "a convolution with weights packed for this CPU",
    "convolution block": "convolution, normalization and activation in one pass",
    "conv1d as linear": "a convolution over time as one matrix product",
    "pointwise convolution as linear": "a convolution of single pixels as one matrix product",
    "KV cache": "what is remembered of earlier tokens, in fewer bytes",
    "greedy search and sampling": "the loop that chooses the next token, without its detours",
    "beam search": "the loop that follows several texts at once, without its detours",
    "continuous batching": "several conversations in one batch, where that is asked for",
}
# What graph layers do with a neighbor's row, before `, mean` or another reduction.
_MESSAGES = {
    "source rows": "neighbors are summed up where they lie, without a copy for each edge",
    "source rows x weight": "neighbors are weighted and summed up where they lie, without a copy for each edge",
    "custom messages": "messages of edges are summed up in one pass",
}
_FIRST_TOKEN = "first token: "


class Pair(Generic[T]):
    """A model twice: as it came, and accelerated.

    Args:
        model: what `accelerate_for_cpu` takes, and can be copied.
        dtype: the first dtype of the accelerated one.

    Attributes:
        eager: the model that was given, which is not changed.
        accelerated: its copy.
    """

    def __init__(self, model: T, *, dtype: str = "auto") -> None:
        self.eager = model
        self.accelerated = accelerate_for_cpu(copy.deepcopy(model), dtype=dtype)
        self._dtype = dtype
        self._lock = threading.Lock()

    def use(self, dtype: str) -> Plan:
        """Accelerate with this dtype from now on, which takes the time of packing where it is another one; the plan.

        Raises ValueError if `accelerate_for_cpu` knows no such dtype. No call of the accelerated model may be under way.
        """
        with self._lock:
            if dtype != self._dtype:
                accelerate_for_cpu(self.accelerated, dtype=dtype)
                self._dtype = dtype
            return explain(self.accelerated)


@dataclass(frozen=True)
class Comparison:
    """Times of the same call.

    Attributes:
        eager, accelerated: seconds per call, over the same rounds.
        amount, unit: what one call gets done, such as 64 "sentences".
    """

    eager: Timing
    accelerated: Timing
    amount: float
    unit: str

    @property
    def seconds(self) -> tuple[float, float]:
        """Median seconds per call, eager and accelerated."""
        return self.eager.seconds.value, self.accelerated.seconds.value

    @property
    def rates(self) -> tuple[float, float]:
        """Units per second, eager and accelerated."""
        eager, accelerated = self.seconds
        return self.amount / eager, self.amount / accelerated

    @property
    def speedup(self) -> float:
        """How many times faster the accelerated call is: the median of the ratios inside each round."""
        return speedup(self.eager, self.accelerated).value

    def __str__(self) -> str:
        eager, accelerated = (in_words(seconds) for seconds in self.seconds)
        slower = "slower: " if self.speedup < 1 else ""
        return f"{slower}{self.speedup:.2f} times as fast: {accelerated} instead of {eager} for {self.amount:,g} {self.unit}"

    def chart(self) -> Figure:
        """Units per second as two bars, wide enough for a phone."""
        from matplotlib.figure import Figure  # not pyplot: no display, no global state

        figure = Figure(figsize=(4.4, 1.5), dpi=144, layout="constrained")
        axes = figure.subplots()
        axes.barh((EAGER, ACCELERATED), self.rates, color=(EAGER_COLOR, OURS_COLOR), height=0.6)
        for place, rate in enumerate(self.rates):
            axes.text(rate, place, f" {rate:,.0f}" if rate >= 100 else f" {rate:.3g}", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(self.rates))
        axes.set_title(f"{self.unit} per second (longer is better)", fontsize=10, loc="left")
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
    """Time both calls in turns, after a call of each that does not count.

    Args:
        eager, accelerated: the same call of both models; each returns when its work is done.
        amount, unit: what one call gets done.
        rounds, seconds: how many bursts of calls, and the least seconds of each.

    Raises ValueError if the amount or the number of rounds is not positive.
    """
    _check_amount(amount)
    systems = {EAGER: eager, ACCELERATED: accelerated}
    timings = interleaved(systems, rounds=rounds, calls=1, seconds=seconds)
    return Comparison(timings[EAGER], timings[ACCELERATED], amount, unit)


def compare_seconds(eager: float, accelerated: float, *, amount: float, unit: str) -> Comparison:
    """What two calls took that were timed elsewhere, such as streams that people watched.

    Raises ValueError if a time or the amount is not positive.
    """
    _check_amount(amount)
    if eager <= 0 or accelerated <= 0:
        raise ValueError(f"eager={eager}, accelerated={accelerated}: accepted are seconds above 0")
    return Comparison(Timing(((eager,),)), Timing(((accelerated,),)), amount, unit)


def plan_rows(plan: Plan) -> list[list[str]]:
    """The plan by `PLAN_COLUMNS`, one row for all parts of a kind: first what was replaced, then what was left and why."""
    kinds = Counter((item.structure, item.dtype, item.reason) for item in (*plan.replaced, *plan.left))
    return [
        [
            f"{count} x {structure}" if count > 1 else structure,
            meaning(structure) if reason is None else f"left as it was: {reason}",
            "as before" if reason is not None else _NUMBERS.get(dtype, dtype),
        ]
        for (structure, dtype, reason), count in kinds.items()
    ]


def plan_sentence(plan: Plan) -> str:
    """How much of the model was replaced, in how many bytes, and by which kernels."""
    if not plan.items:
        return "Nothing is accelerated."
    kernels = (
        f"kernels for {plan.tier}" if plan.kernels == "native" else "no kernels of our own: plain PyTorch"
    )
    held = f", weights in {plan.packed_bytes / 1e6:.1f} MB" if plan.packed_bytes else ""
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    parts = f"{len(plan.replaced)} parts replaced, {len(plan.left)} left as they were"
    return f"{parts}; {_NUMBERS.get(plan.dtype, plan.dtype)}{held}; {kernels}, {threads}."


def meaning(structure: str) -> str:
    """What a structure of a plan is, in plain words; its own name if there are none."""
    if structure.startswith(_FIRST_TOKEN):
        return f"{meaning(structure.removeprefix(_FIRST_TOKEN))}, for the first token only"
    message, _, reduction = structure.rpartition(", ")
    if message in _MESSAGES:
        return f"{_MESSAGES[message]} ({reduction})"
    return _MEANINGS.get(structure, structure)


def in_words(seconds: float) -> str:
    """A time with the unit that suits it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _check_amount(amount: float) -> None:
    if amount <= 0:
        raise ValueError(f"amount={amount}: accepted are numbers above 0")
