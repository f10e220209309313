"""Mixed bits: which linears get a finer dtype first, so that what is lost by a byte that is saved is least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cpu_accel.cli.quantize.measure import LinearLosses, Option


@dataclass(frozen=True)
class Mix:
    """A dtype for each linear.

    Attributes:
        dtypes: {path: dtype}.
        loss: estimated, the sum over the linears.
    """

    dtypes: dict[str, str]
    nbytes: int
    loss: float


def mixes(linears: Sequence[LinearLosses]) -> list[Mix]:
    """From all in their coarsest dtype to all in the one that loses least; each has one linear finer than the one before.

    The next is always the step that gains most for its bytes, among those that no mixture of two others beats (the lower hull of
    each linear), so each mix is the best of its size.
    """
    chosen = {linear.path: _hull(linear)[0] for linear in linears}
    steps = [
        ((before.loss - after.loss) / (after.nbytes - before.nbytes), linear.path, after)
        for linear in linears
        for before, after in zip(_hull(linear), _hull(linear)[1:], strict=False)
    ]
    found = [_mix(chosen)]
    # Along a hull gains fall, so the order keeps the steps of one linear in theirs.
    for _, path, option in sorted(steps, key=lambda step: -step[0]):
        chosen[path] = option
        found.append(_mix(chosen))
    return found


def proposal(found: Sequence[Mix], *, nbytes: float | None = None, loss: float | None = None) -> Mix | None:
    """The mix with the least loss of at most `nbytes`, or the smallest of at most `loss`; None if there is none."""
    if nbytes is not None:
        return next((mix for mix in reversed(found) if mix.nbytes <= nbytes), None)
    return next((mix for mix in found if loss is None or mix.loss <= loss), None)


def _mix(chosen: dict[str, Option]) -> Mix:
    options = chosen.values()
    return Mix(
        {path: option.dtype for path, option in chosen.items()},
        sum(option.nbytes for option in options),
        sum(option.loss for option in options),
    )


def _hull(linear: LinearLosses) -> list[Option]:
    """The options that are worth their bytes, from small to large, each step with less gain for a byte than the one before."""
    hull: list[Option] = []
    for option in sorted(linear.options.values(), key=lambda option: (option.nbytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain(before: Option, after: Option) -> float:
    """Loss that a byte takes away."""
    return (before.loss - after.loss) / (after.nbytes - before.nbytes)
