"""Search for the fastest dtype of each layer with which a model reaches its accuracy on examples.

Each try accelerates the model with an assignment of dtypes, calls it with the examples, and restores it. So the measurement is
that of the final model. The search needs few tries:

1. All layers in the fastest dtype, then in the next ones, until the accuracy is reached.
2. The layers are ranked by the error that each causes alone. Bisection finds how many of the worst layers must stay in the dtype
   that reached the accuracy, while the others use the fastest dtype.
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
from hf_cpu_accel.accuracy.damage import Unit, rank, units_of
from hf_cpu_accel.accuracy.examples import Examples, make_examples
from hf_cpu_accel.check import DISAGREES
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.hosts.find import Root
from hf_cpu_accel.lifecycle import accelerate_roots, restore_roots
from hf_cpu_accel.measure.dtype_choice import NOTHING, Choice
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.rewrite.core.calibration import Example
from hf_cpu_accel.rewrite.core.dtype_table import DtypeTable
from hf_cpu_accel.rewrite.saved import saved_weights

# A shorter search shows no progress bar.
_PROGRESS_DELAY = 3.0  # seconds


def choose(
    target: Any,
    roots: Sequence[Root],
    settings: CPUAccelConfig,
    examples: Iterable[Any] | None,
    calibration: Sequence[Example] = (),
) -> list[Choice]:
    """Choose dtypes for `settings.accuracy`. The models are not accelerated afterwards.

    Args:
        target: the target.
        roots: its models.
        settings: the settings.
        examples: the examples of the user, or None for built-in ones.
        calibration: calls to calibrate int4 weights on.

    Returns:
        One choice per model.

    Raises:
        TypeError, ValueError: examples that the target does not accept.
    """
    from tqdm.auto import tqdm

    restore_roots(roots)
    prepared = make_examples(target, roots, examples)
    with tqdm(desc="accuracy", unit=" tries", delay=_PROGRESS_DELAY, leave=False) as bar:
        choices = [
            _choose_for(root, settings, calls, prepared, calibration, bar.update)
            for root, calls in zip(roots, prepared.calls, strict=True)
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
        reason = (
            "it is being trained"
            if root.trains
            else f"nothing was measured, because {examples.description} do not call it"
        )
        return Choice(examples.default_dtype, (), settings.accuracy, 1.0, NOTHING, reason, {}, 0, 0.0)
    start = time.perf_counter()
    search = _Search(root, settings, calls, examples.called or root.module, calibration, on_try)
    best = search.run()
    return replace(
        best.choice,
        measured=best.measured,
        examples=examples.description,
        layers=best.layers,
        tries=search.tries,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _Try:
    """One assignment of dtypes and its result.

    Attributes:
        choice: the assignment.
        measured: the accuracy.
        units: the units that were packed.
        layers: {dtype: number of packed weights}.
        refused: modules that were left because their packed form differs too much.
    """

    choice: Choice
    measured: float
    units: tuple[Unit, ...]
    layers: dict[str, int]
    refused: tuple[Unit, ...]

    @property
    def holds(self) -> bool:
        """Return whether the accuracy is reached."""
        return self.measured >= self.choice.accuracy


class _Search:
    """The search for one model, which is restored after each try.

    Args:
        root: the model.
        settings: the settings.
        calls: the calls with the examples.
        called: the module to call: the model, or a target that contains it.
        calibration: calls to calibrate int4 weights on.
        on_try: called after each try.

    Attributes:
        tries: number of tries so far.
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
        self._requested = DtypeTable(dict(settings.dtypes).items())

    def run(self) -> _Try:
        """Return the fastest try that reaches the accuracy, or else the last one, in float32."""
        fastest = self._try(self._levels[0])
        level, best = 0, fastest
        while not best.holds and level + 1 < len(self._levels):
            level += 1
            best = self._try(self._levels[level])
        units = (*fastest.refused, *fastest.units)
        if not best.holds or not units or (level == 0 and not fastest.refused):
            return best
        if level == 0:
            return self._pack_refused(best)
        return self._mix(best, level, fastest)

    def _pack_refused(self, best: _Try) -> _Try:
        """Pack the modules that were left in the fastest dtype in the next dtype that fits."""
        for dtype in self._levels[1:]:
            result = self._try(self._levels[0], dict.fromkeys(best.refused, dtype))
            if result.holds and not result.refused:
                return result
        return best

    def _mix(self, best: _Try, level: int, fastest: _Try) -> _Try:
        """Pack the worst units in the dtype of `level`, in which all units reach the accuracy, and the others in the fastest."""
        first, last = self._levels[0], self._levels[level]
        group = self._settings.int4_group
        order = [
            *fastest.refused,
            *rank(self._root.module, self._run_examples, fastest.units, first, group),
        ]
        fails = max(0, len(fastest.refused) - 1)

        fixed: dict[Unit, str] = {}
        count, best = self._bisect(fails, order, last, fixed, best)
        # Some of the worst units may use a dtype between the two.
        for dtype in self._levels[1:level] if count < len(order) else ():
            order = order[:count]
            fixed |= dict.fromkeys(order, dtype)
            count, best = self._bisect(fails, order, last, fixed, best)
        return best

    def _bisect(
        self, fails: int, order: Sequence[Unit], dtype: str, fixed: dict[Unit, str], best: _Try
    ) -> tuple[int, _Try]:
        """Find the least number of first units of `order` that need `dtype`, and the try with it.

        Args:
            fails: a number of units with which the accuracy is not reached.
            order: the units, the worst first.
            dtype: the dtype.
            fixed: dtypes of further units.
            best: the try with all units of `order` in `dtype`.
        """
        holds = len(order)
        while holds - fails > 1:
            middle = (holds + fails) // 2
            result = self._try(self._levels[0], {**fixed, **dict.fromkeys(order[:middle], dtype)})
            if result.holds:
                holds, best = middle, result
            else:
                fails = middle
        return holds, best

    def _try(self, dtype: str, units: dict[Unit, str] | None = None) -> _Try:
        """Accelerate the model in `dtype`, with other dtypes for `units`; measure the accuracy, and restore the model."""
        settings, root = self._settings, self._root
        assert settings.accuracy is not None
        pairs = tuple(sorted((path, kind) for unit, kind in (units or {}).items() for path in unit.modules))
        choice = Choice(dtype, pairs, settings.accuracy, 0.0, self._budget.measure, "", {}, 0, 0.0)
        trial = replace(
            settings,
            accuracy=None,
            verify=bool(settings.verify),
            originals="disk" if settings.originals == "drop" else settings.originals,
        )
        self.tries += 1
        try:
            accelerate_roots([root], trial, choices=[choice], calibration=self._calibration)
            packed = tuple(unit for unit in units_of(root.module) if not self._is_requested(unit))
            layers = Counter(weight.packed.dtype for weight in saved_weights(root.module))
            refused = self._refused()
            measured = self._budget.measured(self._called, settings.accuracy)
        finally:
            restore_roots([root])
        self._on_try()
        return _Try(choice, measured, packed, dict(sorted(layers.items())), refused)

    def _run_examples(self) -> None:
        for call in self._calls:
            call(self._called)

    def _is_requested(self, unit: Unit) -> bool:
        """Return whether the settings name the dtype of the unit."""
        return any(self._requested.of(f"{self._root.name}.{path}") is not None for path in unit.modules)

    def _refused(self) -> tuple[Unit, ...]:
        acceleration = acceleration_of(self._root.module)
        assert acceleration is not None
        paths = [item.name for item in acceleration.plan.left if (item.reason or "").startswith(DISAGREES)]
        modules = dict(self._root.module.named_modules())
        units = (Unit((path,), (f"{path}.weight",)) for path in paths if hasattr(modules[path], "weight"))
        return tuple(unit for unit in units if not self._is_requested(unit))
