"""The search for the fastest dtype of each layer with which a model holds its accuracy on examples.

The model is accelerated with one assignment of dtypes after another, called with the examples, and restored, so that what is
measured is what will serve. Few assignments are tried: all in the fastest dtype, and if that does not hold, all in the next ones
until one does; then the layers are ranked by the error that each makes by itself, and bisection finds how many of the worst have to
stay in the dtype that held, while the others have the fastest.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_cpu_accel.accuracy.budget import budget_of
from hf_cpu_accel.accuracy.calls import Call
from hf_cpu_accel.accuracy.candidates import candidates
from hf_cpu_accel.accuracy.damage import Unit, ranked, units_of
from hf_cpu_accel.accuracy.examples import Examples, make_examples
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.find import Root
from hf_cpu_accel.lifecycle import accelerate_roots, restore_roots
from hf_cpu_accel.measure.dtype_choice import NOTHING, Choice
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.dtype_table import DtypeTable
from hf_cpu_accel.rewrite.core.verify import DISAGREES
from hf_cpu_accel.rewrite.saved import saved_weights

# A search that is over sooner shows no progress bar.
_SECONDS_UNSEEN = 3.0


def choose(
    target: Any,
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    examples: Iterable[Any] | None,
    calibration: Sequence[Example] = (),
) -> list[Choice]:
    """What is to be packed how for `settings.accuracy`: one choice for each model. None of them is accelerated afterwards.

    Args:
        calibration: what four-bit weights are rounded for.

    Raises:
        TypeError, ValueError: examples that the target does not take.
    """
    from tqdm.auto import tqdm

    restore_roots(roots)
    made = make_examples(target, roots, examples)
    with tqdm(desc="accuracy", unit=" tries", delay=_SECONDS_UNSEEN, leave=False) as bar:
        choices = [
            _choose_for(root, settings, calls, made, calibration, bar.update)
            for root, calls in zip(roots, made.calls, strict=True)
        ]
    for choice in choices:
        if not choice.holds:
            warnings.warn(f"hf_cpu_accel: {choice}", RuntimeWarning, stacklevel=4)
    return choices


def _choose_for(
    root: Root,
    settings: CPUAccelConfig,
    calls: list[Call],
    examples: Examples,
    calibration: Sequence[Example],
    on_try: Callable[[], Any],
) -> Choice:
    assert settings.accuracy is not None
    if root.trains or not calls:
        why = (
            "it is being trained" if root.trains else f"{examples.told} do not reach it: nothing was measured"
        )
        return Choice(examples.others, (), settings.accuracy, 1.0, NOTHING, why, {}, 0, 0.0)
    start = time.perf_counter()
    search = _Search(root, settings, calls, examples.whole or root.module, calibration, on_try)
    chosen = search.run()
    return replace(
        chosen.choice,
        measured=chosen.measured,
        examples=examples.told,
        layers=chosen.layers,
        tries=search.tries,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _Try:
    """One assignment of dtypes, and what came of it.

    Attributes:
        choice: the assignment.
        layers: {dtype: number of packed weights}.
        refused: modules whose packed form is so far from them that they were left as they are.
    """

    choice: Choice
    measured: float
    units: tuple[Unit, ...]
    layers: dict[str, int]
    refused: tuple[Unit, ...]

    @property
    def holds(self) -> bool:
        return self.measured >= self.choice.accuracy


class _Search:
    """For one model, which is restored after each try; what is called is that, or what it is a part of.

    Attributes:
        tries: how many there were.
    """

    def __init__(
        self,
        root: Root,
        settings: CPUAccelConfig,
        calls: list[Call],
        called: nn.Module,
        calibration: Sequence[Example],
        on_try: Callable[[], Any],
    ) -> None:
        self.tries = 0
        self._called, self._calibration = called, calibration
        self._root, self._settings, self._calls, self._on_try = root, settings, calls, on_try
        self._budget = budget_of(called, calls)
        self._levels = candidates(root.module)
        self._given = DtypeTable(dict(settings.dtypes).items())

    def run(self) -> _Try:
        """The fastest that holds; the last one, in float32, if none does."""
        fastest = self._try(self._levels[0])
        level, held = 0, fastest
        while not held.holds and level + 1 < len(self._levels):
            level += 1
            held = self._try(self._levels[level])
        units = (*fastest.refused, *fastest.units)
        if not held.holds or not units or (level == 0 and not fastest.refused):
            return held
        if level == 0:
            return self._without_refused(held)
        return self._mixed(held, level, fastest)

    def _without_refused(self, held: _Try) -> _Try:
        """What is left as it is for the fastest dtype has the next one that fits."""
        for dtype in self._levels[1:]:
            tried = self._try(self._levels[0], dict.fromkeys(held.refused, dtype))
            if tried.holds and not tried.refused:
                return tried
        return held

    def _mixed(self, held: _Try, level: int, fastest: _Try) -> _Try:
        """The worst units in the dtype of `level`, in which all together held, and the others in the fastest."""
        first, last = self._levels[0], self._levels[level]
        group = self._settings.int4_group
        order = [
            *fastest.refused,
            *ranked(self._root.module, self._run_examples, fastest.units, first, group),
        ]
        fails = max(0, len(fastest.refused) - 1)

        others: dict[Unit, str] = {}
        count, held = self._bisect(fails, order, last, others, held)
        for dtype in (
            self._levels[1:level] if count < len(order) else ()
        ):  # some of the worst may do with less
            order = order[:count]
            others |= dict.fromkeys(order, dtype)
            count, held = self._bisect(fails, order, last, others, held)
        return held

    def _bisect(
        self, fails: int, order: Sequence[Unit], dtype: str, others: dict[Unit, str], held: _Try
    ) -> tuple[int, _Try]:
        """How few of `order` may have `dtype`, from the first on, where the rest is as `others` says; and the try of that.

        Args:
            fails: with so many it does not hold.
            held: the try of all of them.
        """
        holds = len(order)
        while holds - fails > 1:
            middle = (holds + fails) // 2
            tried = self._try(self._levels[0], {**others, **dict.fromkeys(order[:middle], dtype)})
            if tried.holds:
                holds, held = middle, tried
            else:
                fails = middle
        return holds, held

    def _try(self, dtype: str, units: dict[Unit, str] | None = None) -> _Try:
        """Accelerate in `dtype`, and `units` in theirs; measure, and restore."""
        settings, root = self._settings, self._root
        assert settings.accuracy is not None
        pairs = tuple(sorted((path, kind) for unit, kind in (units or {}).items() for path in unit.modules))
        choice = Choice(dtype, pairs, settings.accuracy, 0.0, self._budget.measure, "", {}, 0, 0.0)
        trial = replace(
            settings,
            accuracy=None,
            compile="off",
            verify=bool(settings.verify),
            originals="disk" if settings.originals == "drop" else settings.originals,
        )
        self.tries += 1
        try:
            accelerate_roots([root], trial, choices=[choice], calibration=self._calibration)
            found = tuple(unit for unit in units_of(root.module) if not self._is_given(unit))
            layers = Counter(weight.packed.dtype for weight in saved_weights(root.module))
            refused = self._refused()
            measured = self._budget.measured(self._called, settings.accuracy)
        finally:
            restore_roots([root])
        self._on_try()
        return _Try(choice, measured, found, dict(sorted(layers.items())), refused)

    def _run_examples(self) -> None:
        for call in self._calls:
            call(self._called)

    def _is_given(self, unit: Unit) -> bool:
        """Whether its dtype was asked for by name."""
        return any(self._given.of(f"{self._root.name}.{path}") is not None for path in unit.modules)

    def _refused(self) -> tuple[Unit, ...]:
        acceleration = acceleration_of(self._root.module)
        assert acceleration is not None
        paths = [item.name for item in acceleration.plan.left if (item.reason or "").startswith(DISAGREES)]
        modules = dict(self._root.module.named_modules())
        units = (Unit((path,), (f"{path}.weight",)) for path in paths if hasattr(modules[path], "weight"))
        return tuple(unit for unit in units if not self._is_given(unit))
