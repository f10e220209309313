"""`torch.export`: the guards and ranges of an exported program, and the nesting of its outputs."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

# torch 2.15 writes the maximum and minimum of two sizes as its own functions.
_SYMBOLIC = re.compile(r"\btorch\.sym_(max|min)\(")


def free_sizes(arguments: Any) -> Any:
    """Return the dynamic shapes for `torch.export` in which every size may vary, if the code allows it."""
    from torch.export import Dim
    from torch.utils._pytree import tree_map

    def free(leaf: Any) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor):
            return None
        return {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size != 1}  # torch specializes on 1

    return tree_map(free, arguments)


def guards_of(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Return the guards of the program on the inputs `L`, besides ranges, as Python expressions."""
    return tuple(_SYMBOLIC.sub(r"\1(", guard) for guard in program._guards_code)


def ranges_of(program: torch.export.ExportedProgram) -> dict[str, tuple[int, int | None]]:
    """Return {symbol: (minimum size, maximum size or None)}."""
    return {
        str(symbol): (int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else None)
        for symbol, bounds in program.range_constraints.items()
        if symbol.is_Symbol
    }


def written_spec(program: torch.export.ExportedProgram) -> str:
    """Return the nesting of the program's outputs as text."""
    from torch.utils._pytree import treespec_dumps

    return treespec_dumps(program.call_spec.out_spec)


def nested(spec: str) -> Callable[[list[Any]], Any]:
    """Return a function that nests flat outputs as in the text of `written_spec`.

    Raises:
        ValueError: `spec` names a class, which torch's reader would import (enumerations and default dicts).
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
