"""Models that were quantized by a tool of torch's (PT2E, QAT): products of rounded weights become products of packed integers.

Such a graph holds weights in 8 bits that are widened before each product, and pairs of ops that round activations to 8 bits and
back by a step that was chosen ahead (or for the tensor). Our products in "int8" choose the step for each token, which is finer, so
those pairs go where a product is all that reads them; with weights alone in 8 bits it is "int8-weight".
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from hf_cpu_accel.compiler.passes.match import FLOATING, args_of, argument, unconverted, value
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import Computed

_PRODUCTS = (aten.linear.default, aten.conv2d.default, aten.conv1d.default)
# The key of `Node.meta` by which this pass tells others in which dtype a weight is to be packed.
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
        whole = _not_rounded(rounded)
        node.meta[PACKED_AS] = "int8-weight" if whole is None else "int8"
        if whole is not None:
            node.replace_input_with(rounded, whole)
        count += 1
    return count


def _is_widened(rewriter: Rewriter, weight: object) -> bool:
    """Whether it is made of numbers of 8 bits, or rounded to such."""
    made = rewriter.sources_of(weight) if isinstance(weight, Node) else None
    if made is None or not isinstance(made[0], Computed):
        return False
    return any(name.startswith("quantized_decomposed.dequantize_per") for name, *_ in made[0].steps)


def _not_rounded(node: Node) -> Node | None:
    """What `node` is, rounded and widened again; None if it is not that."""
    dtype = value(node).dtype
    node = unconverted(node)
    if not _is_called(node, "dequantize_per_t"):
        return None
    rounded = args_of(node)[0]
    if not _is_called(rounded, "quantize_per_t") or args_of(rounded)[1:3] != args_of(node)[1:3]:
        return None
    whole: Node = args_of(rounded)[0]
    return whole if value(whole).dtype is dtype and dtype in FLOATING else None


def _is_called(node: object, name: str) -> bool:
    target: Any = node.target if isinstance(node, Node) else None
    return str(target).startswith(f"quantized_decomposed.{name}")
