"""The layers of a model before and after: each is given what it gets in a call of the original, and timed and compared alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hf_cpu_accel.hosts.arguments import CACHES
from hf_cpu_accel.measure import Agreement, Estimate, compare, float_tensors, interleaved, speedup
from hf_cpu_accel.plan import Plan

_BURST_SECONDS = 0.01


@dataclass(frozen=True)
class Layer:
    """One part of the model.

    Attributes:
        path, kind: in the model, and the class of the original.
        before, after: seconds of a call, eager float32 and accelerated.
        speedup: the median of the ratios in the rounds.
        agreement: of the outputs, given the same inputs.
        operations: multiply-adds count as two; matrix products, convolutions and attention.
        weight_bytes: what a call reads of weights, accelerated.
        refused: why nothing was measured; the numbers are None then.
    """

    path: str
    kind: str
    before: Estimate | None = None
    after: Estimate | None = None
    speedup: Estimate | None = None
    agreement: Agreement | None = None
    operations: int = 0
    weight_bytes: int = 0
    refused: str = ""

    @property
    def intensity(self) -> float:
        """Operations for each byte of weights."""
        return self.operations / max(self.weight_bytes, 1)

    @property
    def rate(self) -> float:
        """10^9 operations a second, accelerated."""
        return 0.0 if self.after is None else self.operations / self.after.value / 1e9


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of parts that make up the model: the members of its lists of layers, and what stands beside those lists."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        lists = [part for part in child.modules() if isinstance(part, nn.ModuleList) and len(part)]
        if isinstance(child, nn.ModuleList):
            for number, member in child.named_children():
                yield f"{path}.{number}", member
        elif lists:
            yield from units(child, f"{path}.")
        elif child is not model:
            yield path, child


def measure(
    eager: nn.Module,
    accelerated: nn.Module,
    plan: Plan,
    forward: Callable[[nn.Module], object],
    *,
    rounds: int,
    on_layer: Callable[[str], None] = lambda path: None,
) -> list[Layer]:
    """In the order in which the layers are called.

    Args:
        eager, accelerated: the model twice, of the same weights.
        plan: what `explain(accelerated)` says.
        forward: calls the model with the inputs of the report.
        rounds: bursts of each layer, before and after in turns.
    """
    calls = _calls(eager, forward)
    layers = []
    for path, call in calls.items():
        on_layer(path)
        before = eager.get_submodule(path)
        kind = type(before).__name__
        try:
            layers.append(_measure(path, before, accelerated.get_submodule(path), plan, call, rounds))
        except Exception as error:  # a layer of the user's may refuse to be called alone
            layers.append(Layer(path, kind, refused=f"{type(error).__name__}: {error}"))
    return layers


def _calls(eager: nn.Module, forward: Callable[[nn.Module], object]) -> dict[str, _Call]:
    """{path: its first call} of each unit that is called."""
    calls: dict[str, _Call] = {}
    handles = []
    for path, module in units(eager):

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            # Not with a cache, which would grow by each further call.
            given = {name: value for name, value in kwargs.items() if name not in CACHES}
            calls.setdefault(path, _Call(args, given, output))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        forward(eager)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _measure(path: str, before: nn.Module, after: nn.Module, plan: Plan, call: _Call, rounds: int) -> Layer:
    def run(module: nn.Module) -> list[Tensor]:
        with torch.inference_mode():
            # Reading makes the values of what is computed when it is read.
            return [tensor.clone() for tensor in float_tensors(module(*call.args, **call.kwargs))]

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        before(*call.args, **call.kwargs)
    agreement = compare(run(after), float_tensors(call.output))
    timings = interleaved(
        {"before": lambda: run(before), "after": lambda: run(after)}, rounds=rounds, seconds=_BURST_SECONDS
    )
    return Layer(
        path,
        type(before).__name__,
        timings["before"].seconds,
        timings["after"].seconds,
        speedup(timings["before"], timings["after"]),
        agreement,
        counter.get_total_flops(),
        weight_bytes(path, before, plan),
    )


def weight_bytes(path: str, original: nn.Module, plan: Plan) -> int:
    """Packed weights as the plan has them; what was not packed counts as it was."""
    packed = sum(item.packed_bytes for item in _below(path, plan))
    return packed or sum(parameter.nbytes for parameter in original.parameters())


def _below(path: str, plan: Plan) -> Iterator[Any]:
    return (item for item in plan.items if item.name == path or item.name.startswith(f"{path}."))


def largest(layers: list[Layer], key: Callable[[Layer], float]) -> float:
    """Of those that were measured; 0 if none was."""
    return max((key(layer) for layer in layers if not layer.refused), default=0.0)


def total(layers: list[Layer], attribute: str) -> float:
    """Seconds of all layers that were measured."""
    estimates = (getattr(layer, attribute) for layer in layers)
    return sum(estimate.value for estimate in estimates if estimate is not None)
