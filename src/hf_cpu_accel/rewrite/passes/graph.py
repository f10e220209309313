"""The data flow of one captured call of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.rewrite.capture.attention.handwritten import join_attention
from hf_cpu_accel.rewrite.capture.call import Call
from hf_cpu_accel.rewrite.capture.normal_forms import CAST, VIEWS
from hf_cpu_accel.rewrite.capture.program import Program, Ref, Step, expect, refs_in, replace_refs, size_of
from hf_cpu_accel.rewrite.capture.recorder import Recorder
from hf_cpu_accel.rewrite.capture.simplify import Steps
from hf_cpu_accel.rewrite.capture.size import Hashed, plain
from hf_cpu_accel.rewrite.capture.tensor_reader import ParameterReader
from hf_cpu_accel.rewrite.core.foreign_code import OwnError, call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.linear.container import FusedContainer
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import NormSpec, identify_norm

_DTYPE_CASTS = CAST - {Tensor.contiguous}
_MOVES = CAST | VIEWS | {torch.roll, Tensor.roll, torch.flatten, Tensor.flatten, Tensor.unflatten}
_LAYER_NORM = (functional.layer_norm, torch.layer_norm)


@dataclass(frozen=True)
class Graph:
    """The steps of one call, with attention as one step each, and the values of the call.

    Attributes:
        inputs: the arguments, with refs in place of tensors.
        output: what the layer returns, with refs in it.
        result: what it returned.
        made: the step of each ref.
        values: the value of each ref in the call.
        modules: of the layer.
    """

    inputs: dict[str, Any]
    output: Any
    result: Any
    made: dict[Ref, Step]
    values: dict[Ref, Any]
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, shadow: Shadow, *args: Any, **kwargs: Any) -> Graph:
        """Capture the call of a shadow; `args` are its first arguments, under the names "0", "1" and so on in `inputs`.

        Raises:
            Refused: the layer rejects the arguments, or computes with tensors from elsewhere.
        """
        call = required(Call.of(args, kwargs))
        try:
            recorder, result = _recorded(shadow, call, ())
        except OwnError as error:
            if not isinstance(error.error, Hashed):
                raise
            recorder, result = _recorded(shadow, call, None)
        output = recorder.refs(result)
        steps = Steps(recorder.steps, output).normalized()
        steps.steps = join_attention(steps.steps, Counter(refs_in(steps.output)))
        values = {recorder._refs[id(value)]: plain(value) for value in (*recorder.inputs, *recorder._alive)}
        recorder.forget()
        names = {**{str(number): ref for number, ref in enumerate(call.given[0])}, **call.given[1]}
        made = {step.result: step for step in steps.without_unread().steps}
        modules = tuple(map(shadow.original, shadow.module.modules()))
        return cls(names, steps.output, result, made, values, modules)

    def producer(self, ref: Any) -> Step | None:
        """Return the step that computes `ref`, behind casts, or None for an input or a constant."""
        step = self.made.get(ref) if isinstance(ref, Ref) else None
        while step is not None and step.function in CAST:
            step = self.made.get(step.args[0])
        return step

    def behind_casts(self, ref: Any) -> Any:
        step = self.made.get(ref) if isinstance(ref, Ref) else None
        return self.behind_casts(step.args[0]) if step is not None and step.function in CAST else ref

    def behind_moves(self, ref: Any) -> Any:
        """Return the tensor whose values `ref` has, in another shape or order."""
        step = self.made.get(ref) if isinstance(ref, Ref) else None
        return self.behind_moves(step.args[0]) if step is not None and step.function in _MOVES else ref

    def sources(self, ref: Any) -> tuple[Ref, ...]:
        """Return the inputs, parameters and results of modules that `ref` follows from without another module between."""
        found: dict[Ref, None] = {}
        waiting, seen = list(refs_in(ref)), set[Ref]()
        while waiting:
            ref = waiting.pop()
            step = self.made.get(ref)
            if ref in seen:
                continue
            seen.add(ref)
            if step is None or step.leaf is not None or isinstance(step.function, ParameterReader):
                found[ref] = None
            elif step.function is not size_of:
                waiting += step.reads
        return tuple(found)

    def linears(self, ref: Any) -> list[Step]:
        """Return the steps of the linears among the sources of `ref`."""
        steps = (self.made.get(source) for source in self.sources(ref))
        return [step for step in steps if step is not None and isinstance(step.leaf, PackedLinear)]

    def evaluate(self, ref: Any, given: Mapping[Ref, Any]) -> Any:
        """Return the value of `ref` with `given` ones in place of those of the call. Casts keep the dtype of their input.

        Raises:
            ValueError: a module would have to run, or a step rejects them.
        """
        values: dict[Ref, Any] = dict(given)
        affected = set(given)
        for step in self.made.values():
            if step.result not in affected and not affected.isdisjoint(step.reads):
                affected.add(step.result)

        def value(ref: Ref) -> Any:
            if ref not in values:
                values[ref] = self.values[ref] if ref in self.values and ref not in affected else run(ref)
            return values[ref]

        def run(ref: Ref) -> Any:
            step = self.made[ref]
            if step.leaf is not None and ref in affected:
                raise ValueError("the value depends on another module")
            args, kwargs = replace_refs((step.args, step.kwargs), value)
            output = (
                args[0] if step.function in _DTYPE_CASTS else call_foreign(step.function, *args, **kwargs)
            )
            if isinstance(output, Refusal):
                raise ValueError(output.reason)
            return output

        return replace_refs(ref, value)

    def program(self, ref: Ref, inputs: int) -> Program:
        """Return the steps that compute `ref` from the inputs."""
        needed = {ref}
        for step in reversed(self.made.values()):
            if step.result in needed:
                needed.update(step.reads)
        checks = [
            step for step in self.made.values() if step.result in needed and step.function is not expect
        ]
        return Program(inputs, checks, ref)

    def norm(self, ref: Any) -> tuple[tuple[nn.Module, NormSpec] | None, Any]:
        """Return the norm that computes `ref`, and its input; (None, `ref`) if none does."""
        step = self.producer(ref)
        module = None
        if step is not None and step.leaf is not None:
            module = step.leaf
        elif step is not None and step.function in _LAYER_NORM:
            weight = self.reader(step.kwargs.get("weight", step.args[2:3]))
            module = next((m for m in self.modules if weight and m._parameters is weight.tensors), None)
        spec = None if module is None else identify_norm(module)
        if step is None or module is None or spec is None:
            return None, ref
        return (module, spec), self.behind_casts(step.args[0])

    def reader(self, ref: Any) -> ParameterReader | None:
        """Return the reader of the parameter that `ref` is, or None."""
        step = self.producer(next(refs_in(ref), None))
        return step.function if step is not None and isinstance(step.function, ParameterReader) else None

    def tensors(self, ref: Any) -> Iterator[Tensor]:
        return (value for value in map(self.values.get, refs_in(ref)) if isinstance(value, Tensor))


def _recorded(shadow: Shadow, call: Call, fixed: tuple[Ref, ...] | None) -> tuple[Recorder, Any]:
    recorder = Recorder(shadow, call.inputs_beside(tensors=True), fixed=fixed)
    args, kwargs = call.arguments(recorder.inputs)
    with torch.no_grad(), shadow.running(), recorder.recording((FusedContainer,)):
        return recorder, required(call_foreign(shadow.module.forward, *args, **kwargs))
