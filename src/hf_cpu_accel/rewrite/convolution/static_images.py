"""The stage that sets static ranges of images between convolutions from calibration examples, so that they pass as int8
(int8-static)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from hf_cpu_accel.ops.chain.joined import can_be_in_bytes
from hf_cpu_accel.packing.activation_range import ObservedValues, Range
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.links import Link
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from hf_cpu_accel.rewrite.core.calibration import NO_EXAMPLES, call, fitting
from hf_cpu_accel.rewrite.core.context import Context

STRUCTURE = "int8 images"
# An image is quantized at run time if one range for all examples is this much worse than a range for each image,
# unless both errors are small enough to be irrelevant.
_WORSE, _NEAR = 1.5, 0.01

Values = dict[int, ObservedValues]


def make_static(context: Context) -> Iterable[PlanItem]:
    """Observe the images of fused blocks in two passes over `context.calibration`, and set their ranges.

    Raises:
        ValueError: there are no examples, or the model rejects one.
    """
    if not context.static:
        return ()
    if not context.calibration:
        raise ValueError(NO_EXAMPLES)
    blocks = {
        path: part for path, part in context.root.named_modules() if isinstance(part, FusedResidualBlock)
    }
    if not blocks:
        context.results.notes.append(
            "int8-static: the model has no fused chains of convolutions, so all inputs are quantized at run time, as in int8"
        )
        return ()
    seen: dict[str, Values] = {path: defaultdict(ObservedValues) for path in blocks}
    with tqdm(total=2 * len(context.calibration), desc="Calibrating", unit="batch", disable=None) as progress:
        for see in (ObservedValues.see_ends, ObservedValues.count):
            with _watching(blocks, seen, see):
                _run_examples(context, progress.update)
    items = [item for path, block in blocks.items() for item in _set_ranges(path, block, seen[path], context)]
    still = sum(item.reason is None for item in items)
    context.results.notes.append(
        f"int8-static: {still} of {len(items)} convolutions return int8 images, with ranges from {len(context.calibration)} "
        f"batches ({context.config.static_range}); all other inputs are quantized at run time, as in int8"
    )
    return items


@contextmanager
def _watching(
    blocks: dict[str, FusedResidualBlock],
    seen: dict[str, Values],
    see: Callable[[ObservedValues, Tensor], None],
) -> Iterator[None]:
    def observer(values: Values) -> Callable[[int, Tensor], None]:
        return lambda number, image: see(values[number], image.float())

    try:
        for path, block in blocks.items():
            block._observer = observer(seen[path])
        yield
    finally:
        for block in blocks.values():
            del block._observer


def _run_examples(context: Context, done: Callable[[], object]) -> None:
    with torch.no_grad():
        for number, example in enumerate(context.calibration):
            partial(call, number, fitting(example, context.float16 is not None), context.root)()
            done()


def _set_ranges(path: str, block: FusedResidualBlock, seen: Values, context: Context) -> Iterator[PlanItem]:
    """Set the ranges of the outputs of convolutions, and yield their rows; poolings keep the range of their input."""
    ranges: list[Range | None] = []
    fits = can_be_in_bytes(block.steps(), last=True)
    for number, link in enumerate(block._chain):
        range: Range | None = None
        if isinstance(link, Link):
            name = f"{path}.{link.path}"
            range, reason = _range_of(seen.get(number), context.config.static_range)
            if not fits[number]:
                range, reason = None, "the next layer has no int8 weights with a multiple of 64 channels"
            if not block.is_narrow:
                range, reason = None, "its block runs in float32"
            yield (
                PlanItem(name, STRUCTURE, "convolutions", "int8-static", 0, None)
                if reason is None
                else (PlanItem.left(name, STRUCTURE, reason))
            )
        ranges.append(range)
    if any(range is not None for range in ranges):
        block._ranges, block._steps = tuple(ranges), None


def _range_of(values: ObservedValues | None, method: str) -> tuple[Range | None, str | None]:
    """Return the range, or the reason why there is none."""
    if values is None:
        return None, "no calibration example reached it: quantized at run time"
    range = values.range(method)
    if not all(map(_is_finite, range)):
        return None, "its values are not finite for the calibration examples: quantized at run time"
    error, own = values.relative(values.error(range)), values.relative(values.own_error)
    if error > max(_WORSE * own, _NEAR):
        return (
            None,
            f"the rounding error is {error:.1%} with a static range and {own:.1%} with a range per image: quantized at run time",
        )
    return range, None


def _is_finite(number: float) -> bool:
    return -1e37 < number < 1e37
