"""`spmm_reduce` with the pointwise operations behind it in the sums' way to memory: bias and activation of a graph layer.

The sums are limited by memory, and what follows them even more so: for 169,000 nodes of 128 features the result is 87 MB, which
would be written, read and written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_cpu_accel.compiler.lowerings.library import HEADER, Source, has_pointwise_user, struct
from hf_cpu_accel.compiler.torch_private import templates

ours = torch.ops.hf_cpu_accel
_REDUCTIONS = ("sum", "mean", "min", "max")  # in the order of Reduce in csrc/sparse/sparse.h


def register() -> None:
    templates.register(ours.spmm_reduce.default, _spmm_reduce)


def _spmm_reduce(
    rowptr: Any,
    col: Any,
    value: Any,
    x: Any,
    reduce: str,
    addend: Any,
    addend_scale: float,
    bias: Any,
    *transposed: Any,
) -> Any:
    """The sums, or None where nothing is to be gained."""
    features = templates.known(x.get_size()[1])
    # Tiles are float32, and sums of bfloat16 rows are not.
    if not features or x.get_dtype() is not torch.float32 or not isinstance(addend_scale, float):
        return None
    if not has_pointwise_user(templates.node_being_lowered()):
        return None
    given = {"rowptr": rowptr, "col": col, "value": value, "x": x, "addend": addend, "bias": bias}
    buffers = {name: templates.dense(tensor) for name, tensor in given.items() if tensor is not None}
    rows, sources = buffers["rowptr"].get_size()[0] - 1, buffers["x"].get_size()[0]
    heads = value.get_size()[1] if value is not None and len(value.get_size()) == 2 else 1

    def call(address: Callable[[str], str], size: Callable[[Any], str]) -> str:
        source = Source(buffers, address, size)
        fields = {
            "rowptr": address("rowptr"),
            "col": address("col"),
            "rows": size(rows),
            "edges": size(sources if col is None else buffers["col"].get_size()[0]),
            "sources": size(sources),
            "features": features,
            "heads": size(heads),
            "reduce": _REDUCTIONS.index(reduce),
            "x": source.rows("x"),
            "addend": source.rows("addend"),
            "addend_scale": f"{addend_scale!r}f",
            "value": address("value"),
            "bias": address("bias"),
        }
        bad = '"hf_cpu_accel::spmm_reduce: rowptr must not decrease or go beyond col, and col must be rows that exist"'
        return f"{struct('Sums', fields)}\nif (!hf_cpu_accel_library().add_up(call)) throw std::runtime_error({bad});"

    layout = templates.cpu_layout(torch.float32, [rows, features])
    return templates.in_tiles(templates.TileTemplate(buffers, layout, features, None, HEADER, call))
