"""Order steps so that all checks come before a step that cannot be undone."""

from __future__ import annotations

from collections.abc import Sequence

from hf_cpu_accel.rewrite.capture.attention.attention_step import Attention
from hf_cpu_accel.rewrite.capture.program import Ref, Step, expect
from hf_cpu_accel.rewrite.capture.tensor_reader import ParameterReader
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer


def writes_over(step: Step) -> bool:
    """Return whether the step overwrites states in a cache, which cannot be restored."""
    return step.effect and isinstance(step.leaf, RecurrentMixer)


def with_checks_first(steps: Sequence[Step]) -> list[Step] | Refusal:
    """Return `steps` with those that may raise a `Mismatch` before the first that overwrites states, or a refusal."""
    first = next((number for number, step in enumerate(steps) if writes_over(step)), None)
    if first is None:
        return list(steps)
    made = {step.result: step for step in steps}
    needed: set[Ref] = set()
    for step in steps[first:]:
        if _may_not_fit(step):
            needed |= _with_sources(step, made)
    early = [step for step in steps[first:] if step.result in needed]
    if any(step.effect and step.function is not expect for step in early):
        return Refusal("operations after a recurrence depend on its output")
    late = [step for step in steps[first:] if step.result not in needed]
    return [*steps[:first], *early, *late]


def _may_not_fit(step: Step) -> bool:
    return step.function is expect or isinstance(step.function, ParameterReader | Attention)


def _with_sources(step: Step, made: dict[Ref, Step]) -> set[Ref]:
    """Return the results of a step and of all steps that it depends on."""
    found = {step.result}
    waiting = list(step.reads)
    while waiting:
        ref = waiting.pop()
        if ref in made and ref not in found:
            found.add(ref)
            waiting += made[ref].reads
    return found
