"""Linears and convolutions over torch's quantized tensors, by the engine of torch that was measured to be fastest.

The tensors between them are torch's own, which no op of this package supports. The engine of a module is the current setting
when it is packed (`torch.backends.quantized.engine`). "x86" uses FBGEMM for linears, which on CPUs with int8 tiles takes three
times as long as oneDNN.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.patching.override import Override
from hf_cpu_accel.patching.restore import add_attribute
from hf_cpu_accel.plan import Plan, PlanItem
from hf_cpu_accel.providers import choice as choices
from hf_cpu_accel.providers.autotune import NATIVE
from hf_cpu_accel.providers.choice import Contest, row_range
from hf_cpu_accel.providers.describe import summary
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import QUANTIZED_OUTPUT

OP, OWN = "quantized", "PyTorch"
_ENGINES = {"fbgemm": "FBGEMM", "onednn": "oneDNN"}
_CLASSES = {
    "torch.ao.nn.quantized": ("Linear", "Conv2d"),
    "torch.ao.nn.intrinsic.quantized": ("LinearReLU", "ConvReLU2d"),
}
_SIZES = (
    *("in_features", "out_features", "in_channels", "out_channels"),
    *("kernel_size", "stride", "padding", "dilation", "groups"),
)
_switching = new_lock()  # the engine is a setting of the process

Run = Callable[[Tensor], Tensor]


class StaticProductRule:
    """A linear or a 2-d convolution of `torch.ao.nn.quantized`, with or without a ReLU."""

    name = "static int8"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        return Match(module, path, None) if type(module) in _classes() else None

    def apply(self, match: Match, context: Context) -> Outcome:
        module, structure = match.module, f"torch.ao static int8 {type(match.module).__name__}"
        reason = refusal_to_swap(module, match.path, context)
        if reason is None and not context.measured:
            reason = "it keeps the engine it was packed for; measuring other engines is off"
        if reason is not None:
            return Outcome((PlanItem.left(match.path, structure, reason),), (module,))
        add_attribute(context.journal, module, "forward", FastestEngine(module))
        item = PlanItem(match.path, structure, OP, "int8", 0, None, provider=OWN)
        return Outcome((item,), (module,))


class FastestEngine(Override):
    """The forward of a quantized module, by the engine that was measured to be fastest for its number of rows or pixels."""

    name = "forward"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.key = f"{type(module).__name__} {torch.backends.quantized.engine} {_sizes(module)}"
        self._repacked: dict[str, Any] = {}
        self._chosen: dict[tuple[int, int], str] = {}  # (threads, range of rows): by whom

    def __call__(self, input: Tensor) -> Tensor:
        own: Run = self.__wrapped__
        if is_tracing() or not input.is_quantized:
            return own(input)
        features = 1 if input.dim() == 4 else -1
        rows = input.numel() // max(1, input.shape[features])
        range_ = torch.get_num_threads(), row_range(max(1, rows))[1]
        chosen = self._chosen.get(range_) or self._decide(range_, rows, input)
        return own(input) if chosen == NATIVE else self._by(chosen)(input)

    @property
    def elsewhere(self) -> dict[tuple[int, int], str]:
        """Return {(first, last) row count: engine}, where it differs from the engine that the module was packed for."""
        chosen = {row_range(rows): name for (_, rows), name in sorted(self._chosen.items())}
        return {rows: name for rows, name in chosen.items() if name != NATIVE}

    def _decide(self, range_: tuple[int, int], rows: int, input: Tensor) -> str:
        choice = choices.chooser().decide(
            f"{self.key} rows<={range_[1]}", rows, partial(self._contest, input)
        )
        if choice is None:
            return NATIVE
        chosen = choice.provider
        if chosen != NATIVE and not (chosen in _available() and self._agrees(chosen, input)):
            chosen = NATIVE
        self._chosen[range_] = chosen
        self._repacked = {
            name: other for name, other in self._repacked.items() if name in self._chosen.values()
        }
        return chosen

    def _contest(self, input: Tensor) -> Contest:
        others = {name: partial(self._run, name, input) for name in _available()}
        return Contest(partial(self.__wrapped__, input), others)

    def _run(self, name: str, input: Tensor) -> Callable[[], object]:
        return partial(self._by(name), input)

    def _by(self, name: str) -> Run:
        repacked = self._repacked.get(name)
        if repacked is None:
            with _engine(_available()[name]):
                repacked = self._repacked[name] = _packed_anew(self.model)
        return partial(type(repacked).forward, repacked)

    def _agrees(self, name: str, input: Tensor) -> bool:
        """Return whether the integers agree up to one step."""
        given, expected = (run(input).int_repr().float() for run in (self._by(name), self.__wrapped__))
        return compare(given, expected).within(QUANTIZED_OUTPUT)

    def __deepcopy__(self, memo: dict[int, Any]) -> FastestEngine:
        return type(self)(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)


def with_engines(plan: Plan, root: nn.Module) -> Plan:
    """Return `plan` with the engines chosen so far."""
    modules = dict(root.named_modules())
    items = []
    for item in plan.items:
        forward = vars(modules.get(item.name, root)).get("forward")
        if item.op == OP and isinstance(forward, FastestEngine):
            elsewhere = forward.elsewhere
            item = dataclasses.replace(item, provider=summary(elsewhere) if elsewhere else OWN)
        items.append(item)
    return dataclasses.replace(plan, items=tuple(items))


def _classes() -> tuple[type, ...]:
    """Return the classes whose modules are imported: without the import there is no such model."""
    found = (getattr(sys.modules.get(file), name, None) for file, names in _CLASSES.items() for name in names)
    return tuple(cls for cls in found if cls is not None)


def _available() -> dict[str, str]:
    """Return {displayed name: engine of torch}."""
    supported = torch.backends.quantized.supported_engines
    return {name: engine for engine, name in _ENGINES.items() if engine in supported}


@contextmanager
def _engine(name: str) -> Iterator[None]:
    with _switching:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def _packed_anew(module: Any) -> Any:
    """Return the same module, packed for the current engine."""
    weight, bias = module._weight_bias()
    repacked = copy.copy(module)
    repacked.__dict__ = {key: value for key, value in vars(module).items() if key != "forward"}
    repacked._modules = {name: copy.copy(child) for name, child in module._modules.items()}
    for child in repacked._modules.values():
        child.__dict__ = dict(vars(child))
    repacked.set_weight_bias(weight, bias)
    return repacked


def _sizes(module: Any) -> str:
    found = (getattr(module, name, None) for name in _SIZES)
    return "x".join(str(size).replace(" ", "") for size in found if size is not None)
