"""`linear`, `ffn` and `gated_ffn` with the pointwise operations after them fused into the store of their tiles.

The library computes the product: it chooses the instruction set, the threads and the cache blocks. Generated code processes each
tile of 32 columns while it is in the L1 cache: a gate, a scale, a modulation, a conversion. That saves reading and writing the
result, 24 MB for 1024 tokens of 3072 features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_cpu_accel.abi import ACTIVATIONS, WEIGHT_KINDS
from hf_cpu_accel.compiler.lowerings.library import HEADER, Source, has_pointwise_user, struct
from hf_cpu_accel.compiler.torch_private import templates
from hf_cpu_accel.packing.linear import PANEL_FEATURES, dtype_of

ours = torch.ops.hf_cpu_accel


def register() -> None:
    templates.register(ours.linear.default, _linear)
    templates.register(ours.ffn.default, _ffn)
    templates.register(ours.gated_ffn.default, _gated_ffn)


def _linear(
    input: Any, weight: Any, scale: Any, bias: Any, residual: Any, out_features: int, activation: str
) -> Any:
    return _product(input, (weight, scale, bias), (), residual, 0, out_features, activation)


def _ffn(input: Any, *arguments: Any) -> Any:
    return _product(input, arguments[:3], arguments[3:6], *arguments[6:])


def _gated_ffn(input: Any, *arguments: Any) -> Any:
    parts = (*arguments, False)[:11]  # the last argument may be left out
    return _product(input, parts[:3], parts[3:6], *parts[6:10], gated=True, gate_last=parts[10])


def _product(
    input: Any,
    first: Sequence[Any],
    second: Sequence[Any],
    residual: Any,
    intermediate_features: int,
    out_features: int,
    activation: str,
    *,
    gated: bool = False,
    gate_last: bool = False,
) -> Any:
    """Return the lowered op, or None where generated code gains nothing."""
    if not isinstance(out_features, int) or not has_pointwise_user(templates.node_being_lowered()):
        return None
    weights = [weight for weight, *_ in filter(None, (first, second)) if weight is not None]
    # Accelerated modules pass their packed weights as tensors, whose sizes are symbols with `dynamic=True`.
    if any(templates.known(size) is None for weight in weights for size in weight.get_size()):
        return None
    if any(weight.get_dtype() is torch.uint8 and len(weight.get_size()) == 5 for weight in weights):
        return None  # affine groups, which the library's functions do not support
    sizes = [*input.get_size()[:-1], out_features]
    buffers = {"input": templates.matrix(input)}
    if residual is not None:
        buffers["residual"] = templates.matrix(residual)
    for name, parts in (("first", first), ("second", second)):
        for part, value in zip(("weight", "scale", "bias"), parts, strict=False):
            if value is not None:
                buffers[f"{name}_{part}"] = templates.dense(value)
    rows, in_features = buffers["input"].get_size()
    layout = templates.cpu_layout(input.get_dtype(), [rows, out_features])

    def call(address: Callable[[str], str], size: Callable[[Any], str]) -> str:
        source = Source(buffers, address, size)
        fields = {
            "rows": size(rows),
            "in_features": size(in_features),
            "intermediate_features": intermediate_features,
            "out_features": out_features,
            "input": source.rows("input"),
            "residual": source.rows("residual"),
            **_weight(source, "first"),
            **_weight(source, "second"),
            "activation": ACTIVATIONS.index(activation),
            "gated": str(gated).lower(),
            "gate_last": str(gate_last).lower(),
        }
        return struct("Product", fields) + "hf_cpu_accel_library().multiply(call);"

    full = PANEL_FEATURES if out_features % PANEL_FEATURES == 0 else None
    template = templates.TileTemplate(buffers, layout, PANEL_FEATURES, full, HEADER, call)
    return templates.shaped(templates.in_tiles(template), sizes)


def _weight(source: Source, name: str) -> dict[str, Any]:
    """Return the fields of the struct Weight of that name; none for an absent weight."""
    if f"{name}_weight" not in source.buffers:
        return {}
    kind, group = _form(source.buffers[f"{name}_weight"])
    fields = {
        "data": source.address(f"{name}_weight"),
        "kind": kind,
        "group": group,
        "scale": source.address(f"{name}_scale"),
        "bias": source.rows(f"{name}_bias"),
    }
    return {f"{name}.{field}": value for field, value in fields.items()}


def _form(weight: Any) -> tuple[int, int]:
    """Return the number of the kind of a packed weight, and the number of input features per multiplier of int4."""
    sizes = [int(size) for size in weight.get_size()]
    dtype = dtype_of(torch.empty(sizes, dtype=weight.get_dtype(), device="meta"))
    return WEIGHT_KINDS.index(dtype), (sizes[2] - PANEL_FEATURES) // 16 if dtype == "int4" else 0
