"""Models quantized by torch's tools (PT2E, QAT): products of rounded weights become products of packed integers.

In these graphs 8-bit weights are widened before each product, and pairs of ops round activations to 8 bits and back by a fixed
step. Products in "int8" choose a step per token, which is finer, so pairs that only a product reads are removed. With only the
weights in 8 bits the dtype is "int8-weight".
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, args_of, argument, unconverted, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import Computed

_PRODUCTS = (aten.linear.default, aten.conv2d.default, aten.conv1d.default)
# The key of `Node.meta` with the dtype to pack a weight in, for later passes.
PACKED_AS = "packed_as"


def mark_quantized(rewriter: Rewriter) -> int:
    """Mark products of quantized models with the dtype of their packed weight, and remove the rounding of their input.

    Return how many.
    """
    count = 0
    for node in rewriter.calls(*_PRODUCTS):
        if not _is_widened(rewriter, argument(node, "weight")):
            continue
        rounded = args_of(node)[0]
        exact = _not_rounded(rounded)
        node.meta[PACKED_AS] = "int8-weight" if exact is None else "int8"
        if exact is not None:
            node.replace_input_with(rounded, exact)
        count += 1
    return count


def _is_widened(rewriter: Rewriter, weight: object) -> bool:
    """Return whether the weight is dequantized from 8 bits."""
    origin = rewriter.sources_of(weight) if isinstance(weight, Node) else None
    if origin is None or not isinstance(origin[0], Computed):
        return False
    return any(name.startswith("quantized_decomposed.dequantize_per") for name, *_ in origin[0].steps)


def _not_rounded(node: Node) -> Node | None:
    """Return the value that `node` is after quantizing and dequantizing; None if `node` is anything else."""
    dtype = value(node).dtype
    node = unconverted(node)
    if not _is_called(node, "dequantize_per_t"):
        return None
    rounded = args_of(node)[0]
    if not _is_called(rounded, "quantize_per_t") or args_of(rounded)[1:3] != args_of(node)[1:3]:
        return None
    exact: Node = args_of(rounded)[0]
    return exact if value(exact).dtype is dtype and dtype in FLOATING else None


def _is_called(node: object, name: str) -> bool:
    target: Any = node.target if isinstance(node, Node) else None
    return str(target).startswith(f"quantized_decomposed.{name}")
