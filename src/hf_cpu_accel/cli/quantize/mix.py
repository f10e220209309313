"""Choose mixed dtypes: linears get a finer dtype in the order of the loss that a byte removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cpu_accel.cli.quantize.measure import LinearLosses, Option


@dataclass(frozen=True)
class Mix:
    """A dtype for each linear.

    Attributes:
        dtypes: {path: dtype}.
        nbytes: size of all packed weights in bytes.
        loss: estimated loss, the sum over the linears.
    """

    dtypes: dict[str, str]
    nbytes: int
    loss: float


def mixes(linears: Sequence[LinearLosses]) -> list[Mix]:
    """Return mixes from all linears in their coarsest dtype to all in the dtype with the least loss.

    Each mix has one linear in a finer dtype than the mix before: the one that removes most loss per byte, among the options on the
    lower hull of (bytes, loss). So each mix has the least loss for its size.
    """
    chosen = {linear.path: _hull(linear)[0] for linear in linears}
    steps = [
        ((before.loss - after.loss) / (after.nbytes - before.nbytes), linear.path, after)
        for linear in linears
        for before, after in zip(_hull(linear), _hull(linear)[1:], strict=False)
    ]
    result = [_mix(chosen)]
    # Gains fall along a hull, so sorting by gain preserves the order of the steps of one linear.
    for _, path, option in sorted(steps, key=lambda step: -step[0]):
        chosen[path] = option
        result.append(_mix(chosen))
    return result


def proposal(
    candidates: Sequence[Mix], *, nbytes: float | None = None, loss: float | None = None
) -> Mix | None:
    """Return the mix with the least loss within `nbytes`, or else the smallest mix with at most `loss`; None if none fits."""
    if nbytes is not None:
        return next((mix for mix in reversed(candidates) if mix.nbytes <= nbytes), None)
    return next((mix for mix in candidates if loss is None or mix.loss <= loss), None)


def _mix(chosen: dict[str, Option]) -> Mix:
    options = chosen.values()
    return Mix(
        {path: option.dtype for path, option in chosen.items()},
        sum(option.nbytes for option in options),
        sum(option.loss for option in options),
    )


def _hull(linear: LinearLosses) -> list[Option]:
    """Return the options on the lower hull of (bytes, loss), from small to large; each step gains less per byte than the last."""
    hull: list[Option] = []
    for option in sorted(linear.options.values(), key=lambda option: (option.nbytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain(before: Option, after: Option) -> float:
    """Return the loss that each further byte removes."""
    return (before.loss - after.loss) / (after.nbytes - before.nbytes)
