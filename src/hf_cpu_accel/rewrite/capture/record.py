"""Record one call of a layer as a program, or return the reason why not."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.guard.guard import Guard
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.rewrite.capture.cached_functions import forget_results
from hf_cpu_accel.rewrite.capture.call import Call
from hf_cpu_accel.rewrite.capture.call_record import FOREIGN
from hf_cpu_accel.rewrite.capture.check_order import with_checks_first, writes_over
from hf_cpu_accel.rewrite.capture.constants import with_constants
from hf_cpu_accel.rewrite.capture.program import Program, Ref, Step, refs_in
from hf_cpu_accel.rewrite.capture.recorder import Recorder
from hf_cpu_accel.rewrite.capture.shared_states import KEEP
from hf_cpu_accel.rewrite.capture.simplify import Steps
from hf_cpu_accel.rewrite.capture.size import Hashed
from hf_cpu_accel.rewrite.capture.state_snapshot import StateSnapshot
from hf_cpu_accel.rewrite.capture.tensor_reader import is_package_module
from hf_cpu_accel.rewrite.capture.torch_products import torch_products
from hf_cpu_accel.rewrite.core.foreign_code import OwnError, call_foreign
from hf_cpu_accel.rewrite.core.grouping import disable_grouping
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.tolerance import ENCODER_LAYER, FEW_ROWS

_MOST_FIXED = 8  # sizes that become keys; finding each takes a call


def record(layer: Any, call: Call) -> tuple[Program, Guard, Any] | Refusal:
    """Return the program of a call of a fused layer, the guard of its validity, and its output, which is not compared here."""
    shadow = Shadow(layer)
    count = len(call.inputs)
    steps = _steps(layer, shadow, call)
    if by_torch := torch_products(steps.steps, count):
        return Refusal(f"PyTorch computes part of it ({', '.join(by_torch)})")
    program = Program(count, required(with_checks_first(steps.steps)), steps.output)
    program.writes_over = any(map(writes_over, steps.steps))
    inputs = call.inputs_beside()
    try:
        with torch.no_grad(), disable_grouping():
            output = call.snapshot_outputs(program(inputs), inputs)
    except Exception as error:
        return Refusal(f"replaying its recorded operations raises {type(error).__name__}")
    return program, Guard(layer, structure=False, recorded=True), output


def _steps(layer: Any, shadow: Shadow, call: Call) -> Steps:
    """Return the steps of a call.

    Raises:
        Refused: the call cannot be recorded.
    """
    fixed: tuple[Ref, ...] | None = ()
    looks_again = True
    while True:
        # Copies, since a layer that is refused for writing to them has already written. None are inference tensors.
        with torch.inference_mode(mode=False):
            inputs = call.inputs_beside(tensors=True)
        recorder = Recorder(shadow, inputs, call.index, fixed=fixed)
        try:
            return _record_steps(layer, shadow, recorder, call)
        except OwnError as error:
            if isinstance(error.error, Hashed) and fixed is not None:
                fixed = (*fixed, error.error.size) if len(fixed) < _MOST_FIXED else None
            elif looks_again and _is_foreign(error.error) and forget_results(shadow.module):
                looks_again = False
            else:
                raise
        finally:
            recorder.forget()


def _is_foreign(error: Exception) -> bool:
    return isinstance(error, Refused) and error.refusal is FOREIGN


def _record_steps(layer: Any, shadow: Shadow, recorder: Recorder, call: Call) -> Steps:
    """Record the steps of a call, with its inputs and output."""
    args, kwargs = call.arguments(recorder.inputs)
    given = list(_leaves((args, kwargs)))
    kept = StateSnapshot(
        [m for m in shadow.module.modules() if m is shadow.module or not is_package_module(m)]
    )
    try:
        with (
            _random(),
            torch.inference_mode(mode=False),
            torch.no_grad(),
            shadow.running(),
            recorder.recording(),
        ):
            output = required(call_foreign(layer._original_class.forward, shadow.module, *args, **kwargs))
    finally:
        changed = kept.restore()
    if changed is not None:
        raise Refused(Refusal(f"it keeps state between calls ({changed})"))
    now = list(_leaves((args, kwargs)))
    if len(now) != len(given) or any(one is not other for one, other in zip(now, given, strict=True)):
        raise Refused(Refusal("it modifies a list or dictionary among its arguments"))
    result = recorder.refs(output)
    if recorder.aliases.are_ambiguous(recorder.steps, {*refs_in(result), *_handed_out(recorder.steps)}):
        raise Refused(Refusal("it writes in place to tensors that may share memory"))
    return with_constants(Steps(recorder.steps, result).simplified(), recorder.aliases)


def _handed_out(steps: list[Step]) -> Iterator[Ref]:
    """Yield the refs that are stored in a cache, or for later layers."""
    return (ref for step in steps if step.function in KEEP for ref in step.reads)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values in lists, tuples and dictionaries, in order."""
    if type(value) in (tuple, list):
        for part in value:
            yield from _leaves(part)
    elif type(value) is dict:
        yield from _leaves(list(value.items()))
    else:
        yield value


@contextmanager
def _random() -> Iterator[None]:
    """Check that the code inside draws no random numbers; if it does, restore the generators.

    Raises:
        Refused: it does.
    """
    numpy: Any = sys.modules.get("numpy.random")
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.get_state(legacy=False)
    drawn = False
    try:
        yield
    finally:
        if not torch.equal(before[0], torch.get_rng_state()):
            torch.set_rng_state(before[0])
            drawn = True
        if random.getstate() != before[1]:
            random.setstate(before[1])
            drawn = True
        if numpy is not None and str(numpy.get_state(legacy=False)) != str(before[2]):
            numpy.set_state(before[2])
            drawn = True
    if drawn:
        raise Refused(Refusal("it draws random numbers"))


def alike(layer: nn.Module, output: Any, expected: Any) -> bool:
    """Return whether the steps of a layer agree with its forward, up to rounding."""
    packed = {m.packed_dtype for m in layer.modules() if isinstance(m, PackedModule)}
    # Inputs are rounded to the dtype of the weights: a slightly different product may round to other inputs.
    bound = ENCODER_LAYER.bfloat16 if "bfloat16" in packed else ENCODER_LAYER
    few = 1.0 if packed.isdisjoint(QUANTIZED) else FEW_ROWS
    return compare(output, expected, check_dtype=True, equal_nan=True).within(bound, few=few)
