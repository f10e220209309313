"""`torch.export`: what an exported program asks of its inputs, and the nesting of its outputs."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# torch 2.15 writes the largest and least of two sizes as functions of its own.
_SYMBOLIC = re.compile(r"\btorch\.sym_(max|min)\(")


def free_sizes(arguments: Any) -> Any:
    """For `torch.export`: every size of every tensor may vary, as far as the code allows it."""
    from torch.export import Dim
    from torch.utils._pytree import tree_map

    def free(leaf: Any) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor):
            return None
        return {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != 1}  # one is a case of its own

    return tree_map(free, arguments)


def guards_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """What must be true of the inputs `L` for the program to be right, besides ranges, as Python expressions."""
    return tuple(_SYMBOLIC.sub(r"\1(", guard) for guard in program._guards_code)


def ranges_of(program: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """{symbol: (least size, greatest size or None)}."""
    return {
        str(symbol): (int(held.lower), int(held.upper) if held.upper.is_Integer else None)
        for symbol, held in program.range_constraints.items()
        if symbol.is_Symbol
    }


def written_spec(program: torch.export.ExportedProgram) -> str:
    """The nesting of the program's outputs as text."""
    from torch.utils._pytree import treespec_dumps

    return treespec_dumps(program.call_spec.out_spec)


def nested(spec: str) -> Callable[[list[Any]], Any]:
    """What gives a row of outputs the nesting that `written_spec` wrote.

    Raises:
        ValueError: `spec` names a class to be imported, as torch's reader does for those of enumerations and of default dicts.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    if _imports(json.loads(spec)[1]):
        raise ValueError("a nesting that imports classes")
    read = treespec_loads(spec)
    if read.is_leaf():
        return operator.itemgetter(0)
    return lambda values: tree_unflatten(values, read)


def _imports(spec: Any) -> bool:
    context = spec["context"]
    with suppress(
        TypeError, ValueError
    ):  # of some kinds of nodes it is no JSON, and of those nothing is decoded
        context = json.loads(context)
    enumerations = '"__enum__"' in json.dumps(context, ensure_ascii=False)
    return (
        spec["type"] == "collections.defaultdict" or enumerations or any(map(_imports, spec["children_spec"]))
    )
