"""What belongs to a compiled block besides its library; importing it imports none of the passes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cpu_accel.compiler.background.reads import Read
from hf_cpu_accel.compiler.bind import Request
from hf_cpu_accel.compiler.report import GraphReport

LIBRARY = "block.pt2"
Step = tuple[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an input of the graph comes from.

    Attributes:
        kind: "input" (a tensor of the call), "state" (a parameter, buffer or other tensor that the block holds) or "constant".
        path: the number of the tensor; the steps that lead from the block to what it holds; the tensor itself.
    """

    kind: str
    path: Any


@dataclass(frozen=True)
class Compiled:
    """What belongs to a library.

    Attributes:
        places: of the inputs of the graph before it was rewritten.
        kept, requests: as `bind.Bound` takes them.
        sizes: of each tensor of the call: numbers, names of symbols, and formulas of these.
        ranges: {symbol: (least, greatest)}; None where there is no greatest.
        guards: conditions on the sizes of the tensors of the call, named as `size_name` does, that must be true.
        outputs: what the call returns, in a row: numbers of the library's outputs, or ("constant", value).
        spec: the nesting of that row, as pytree writes it.
        reads: the attributes that the library has the values of.
        sources: {file: hash} of what ran while it was traced.
        graph: counts of ops and rewrites.
    """

    places: tuple[Place, ...]
    kept: tuple[int, ...]
    requests: tuple[Request, ...]
    sizes: tuple[tuple[int | str, ...], ...]
    ranges: dict[str, tuple[int, int | None]]
    guards: tuple[str, ...]
    outputs: tuple[Any, ...]
    spec: str
    reads: tuple[Read, ...]
    sources: dict[str, str]
    graph: GraphReport


def size_name(tensor: int, dim: int) -> str:
    """What guards call the size of a tensor of the call, both counted from 0."""
    return f"t{tensor}_{dim}"


def follow(block: nn.Module, path: tuple[Step, ...]) -> Any:
    """What the steps lead to."""
    value: Any = block
    for kind, name in path:
        value = vars(value)[name] if kind == "attribute" else operator.getitem(value, name)
    return value
