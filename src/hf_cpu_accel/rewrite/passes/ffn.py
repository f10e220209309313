"""The feed-forward network in a program: its linears and its activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.rewrite.capture.program import Step
from hf_cpu_accel.rewrite.core.activations import identify
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.passes.graph import Graph


@dataclass(frozen=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), or without the factor.

    Attributes:
        up: one linear, or the gate and the factor; the gate is the first half of one that is both.
        input: x.
    """

    up: tuple[PackedLinear, ...]
    down: PackedLinear
    activation: str
    gated: bool
    input: Any


def read_ffn(graph: Graph, down: Step) -> FeedForward | None:
    """Return the network that ends in the linear of `down`, or None if it does not."""
    ups, hidden = graph.linears(down.args[0]), down.leaf.in_features
    inputs = {graph.behind_casts(step.args[0]) for step in ups}
    if len(inputs) != 1 or len(ups) > 2:
        return None
    for order in (ups, ups[::-1]):
        gated = len(order) == 2 or order[0].leaf.out_features == 2 * hidden

        def activated(
            grid: Tensor, factor: float = 1.0, order: list[Step] = order, gated: bool = gated
        ) -> Tensor:
            rows = functional.pad(grid, (0, -len(grid) % hidden)).view(-1, hidden)
            parts = [rows, torch.full_like(rows, factor)] if gated else [rows]
            parts = [torch.cat(parts, dim=-1)] if len(order) == 1 else parts
            given = {step.result: part for step, part in zip(order, parts, strict=True)}
            output: Tensor = graph.evaluate(down.args[0], given)
            return output.flatten()[: len(grid)]

        try:
            name = identify(activated)
        except ValueError:
            return None
        if name is not None and (not gated or identify(lambda grid: activated(grid, 3.0) / 3) == name):
            return FeedForward(tuple(step.leaf for step in order), down.leaf, name, gated, inputs.pop())
    return None
