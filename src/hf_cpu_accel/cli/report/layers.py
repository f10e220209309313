"""Measure the layers of a model, eager and accelerated, each alone with its inputs in a call of the original model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hf_cpu_accel.check import float_tensors
from hf_cpu_accel.hosts.arguments import CACHES
from hf_cpu_accel.measure import Agreement, Estimate, compare, interleaved, speedup
from hf_cpu_accel.plan import Plan

_BURST_SECONDS = 0.01


@dataclass(frozen=True)
class Layer:
    """The results of one layer.

    Attributes:
        path: path of the layer in the model.
        kind: class name of the original layer.
        before: seconds of a call, eager float32; None if the layer was not measured.
        after: seconds of a call, accelerated.
        speedup: median of the ratios in the rounds.
        agreement: difference of the outputs for the same inputs.
        operations: operations of matrix products, convolutions and attention; a multiply-add counts as two.
        weight_bytes: bytes of weights that an accelerated call reads.
        refused: why the layer was not measured; empty if it was.
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
        """Return the operations per byte of weights."""
        return self.operations / max(self.weight_bytes, 1)

    @property
    def rate(self) -> float:
        """Return 10^9 operations per second of the accelerated layer."""
        return 0.0 if self.after is None else self.operations / self.after.value / 1e9


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the layers: the members of lists of layers, and the modules next to these lists."""
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
    """Measure the layers, in the order of their calls.

    Args:
        eager: the original model.
        accelerated: an accelerated copy with the same weights.
        plan: `explain(accelerated)`.
        forward: calls a model with the inputs of the report.
        rounds: bursts of calls per layer, eager and accelerated in turns.
        on_layer: called with the path of each layer.
    """
    calls = _calls(eager, forward)
    layers = []
    for path, call in calls.items():
        on_layer(path)
        before = eager.get_submodule(path)
        kind = type(before).__name__
        try:
            layers.append(_measure(path, before, accelerated.get_submodule(path), plan, call, rounds))
        except Exception as error:  # a custom layer may fail outside of its model
            layers.append(Layer(path, kind, refused=f"{type(error).__name__}: {error}"))
    return layers


def _calls(eager: nn.Module, forward: Callable[[nn.Module], object]) -> dict[str, _Call]:
    """Return {path: first call} of each layer that is called."""
    calls: dict[str, _Call] = {}
    handles = []
    for path, module in units(eager):

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            # Without the KV cache, which would grow with each further call.
            uncached = {name: value for name, value in kwargs.items() if name not in CACHES}
            calls.setdefault(path, _Call(args, uncached, output))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        forward(eager)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _measure(path: str, before: nn.Module, after: nn.Module, plan: Plan, call: _Call, rounds: int) -> Layer:
    def run(module: nn.Module) -> list[Tensor]:
        with torch.inference_mode():
            # Cloning computes lazy outputs.
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
    """Return the bytes of the packed weights of a layer, or of its original weights if none is packed."""
    packed = sum(item.packed_bytes for item in _below(path, plan))
    return packed or sum(parameter.nbytes for parameter in original.parameters())


def _below(path: str, plan: Plan) -> Iterator[Any]:
    return (item for item in plan.items if item.name == path or item.name.startswith(f"{path}."))


def largest(layers: list[Layer], key: Callable[[Layer], float]) -> float:
    """Return the largest `key(layer)` of the layers that were measured; 0 if none was."""
    return max((key(layer) for layer in layers if not layer.refused), default=0.0)


def total(layers: list[Layer], attribute: str) -> float:
    """Return the sum of an attribute in seconds, "before" or "after", over the layers that were measured."""
    estimates = (getattr(layer, attribute) for layer in layers)
    return sum(estimate.value for estimate in estimates if estimate is not None)
