"""The metadata of a compiled block. Importing this file imports none of the passes."""

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
    """The source of an input of the graph.

    Attributes:
        kind: "input" (a tensor of the call), "state" (a parameter, buffer or other tensor of the block) or "constant".
        path: of "input" the index of the tensor; of "state" the steps from the block to it; of "constant" the tensor itself.
    """

    kind: str
    path: Any


@dataclass(frozen=True)
class Compiled:
    """The metadata of a library.

    Attributes:
        places: the inputs of the graph before it was rewritten.
        kept, requests: arguments of `bind.Bound`.
        sizes: the sizes of each tensor of the call: numbers, names of symbols, and formulas of symbols.
        ranges: {symbol: (minimum, maximum or None)}.
        guards: conditions on the sizes of the tensors of the call, named by `size_name`, that must be true.
        outputs: the flat outputs of the call: indices of the library's outputs, or ("constant", value).
        spec: the nesting of the outputs, as written by pytree.
        reads: the attributes whose values are compiled into the library.
        sources: {file: hash} of the Python files that ran while the block was traced.
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
    """Return the name in guards of the size of a tensor of the call; both arguments count from 0."""
    return f"t{tensor}_{dim}"


def follow(block: nn.Module, path: tuple[Step, ...]) -> Any:
    """Return the value at the end of the steps from `block`."""
    value: Any = block
    for kind, name in path:
        value = vars(value)[name] if kind == "attribute" else operator.getitem(value, name)
    return value
