"""Replacement of convolutions of images and over time by `conv2d` with channels last, with additions and activations fused.

Each `conv2d` is between two permutations that are views. So images stay in channels-last order from one convolution to the next,
through pointwise operations, norms and concatenations.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from hf_cpu_accel.compiler.passes.activation import ACTIVATIONS, read_activation
from hf_cpu_accel.compiler.passes.match import (
    FLOATING,
    args_of,
    argument,
    is_call,
    is_tensor,
    value,
)
from hf_cpu_accel.compiler.passes.quantized import PACKED_AS
from hf_cpu_accel.compiler.passes.residual import is_residual
from hf_cpu_accel.compiler.rewriter import Rewriter, aten
from hf_cpu_accel.compiler.weight_transforms import PackedConvolution
from hf_cpu_accel.providers import convolution as providers
from hf_cpu_accel.rewrite.convolution.gemm import MANY_WEIGHTS, MIN_CHANNELS
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES

ours = torch.ops.hf_cpu_accel
_TO_ROWS, _TO_IMAGE = [0, 2, 3, 1], [0, 3, 1, 2]
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def lower_convolutions(rewriter: Rewriter) -> int:
    """Replace convolutions by `conv2d` on packed weights, with additions and activations behind them. Return how many."""
    views = list(rewriter.calls(aten.view.default))
    if rewriter.is_written(*views):
        return 0  # these must stay views, which the new order of images does not allow
    count = sum(_pack(rewriter, node) for node in rewriter.calls(aten.conv2d.default, aten.conv1d.default))
    if not count:
        return 0
    for view in views:
        view.target = aten.reshape.default
    rewriter.refresh()
    for node in rewriter.calls(aten.add.Tensor):
        if not node.kwargs:
            any(_add(rewriter, node, *pair) for pair in (args_of(node), args_of(node)[::-1]))
    for node in rewriter.calls(*ACTIVATIONS):
        _activate(rewriter, node)
    return count


def _pack(rewriter: Rewriter, node: Node) -> bool:
    input, weight, bias, stride, padding, dilation, groups = (argument(node, name) for name in _ARGUMENTS)
    if not rewriter.is_constant(weight) or groups != 1 or rewriter.is_written(weight):
        return False
    kernel, image = value(weight), value(input)
    if kernel.dtype not in FLOATING or not kernel.dtype is image.dtype is value(node).dtype:
        return False
    if image.dim() != kernel.dim() or min(kernel.shape[:2]) < MIN_CHANNELS:
        return False
    dtype = _dtype(rewriter, node, kernel, stride, dilation)
    if dtype is None:
        return False
    tiled = providers.by_tiles(kernel.shape, dtype, stride, dilation)
    data, *scale = rewriter.derived(PackedConvolution(dtype, tiled), [weight])
    window = {
        "kernel_size": list(kernel.shape[2:]),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
    }
    if image.dim() == 3:  # over time: an image of one row
        input = rewriter.call(node, aten.unsqueeze.default, input, 2)
        window = {name: [0 if name == "padding" else 1, *sides] for name, sides in window.items()}
    rows = rewriter.call(node, aten.permute.default, input, _TO_ROWS)
    output = rewriter.call(
        node,
        ours.conv2d.default,
        input=rows,
        weight=data,
        scale=scale[0] if scale else None,
        bias=bias,
        out_channels=int(kernel.shape[0]),
        **window,
        activation="none",
    )
    output = rewriter.call(node, aten.permute.default, output, _TO_IMAGE)
    if image.dim() == 3:
        output = rewriter.call(node, aten.squeeze.dim, output, 2)
    rewriter.replace(node, output)
    return True


def _dtype(
    rewriter: Rewriter, node: Node, kernel: torch.Tensor, stride: list[int], dilation: list[int]
) -> str | None:
    """Return the dtype to pack the weight in; None where oneDNN's convolution is faster.

    In a graph oneDNN's weight is not in its own layout, which is not a plain tensor, so it is reordered in every call. `joined`
    accounts for that.
    """
    weight_dtype = str(kernel.dtype).removeprefix("torch.")
    dtype = rewriter.dtype or node.meta.get(PACKED_AS, weight_dtype)
    if dtype in ("int8", "int4"):
        return "int8" if kernel[0].numel() <= MAX_INTEGER_FEATURES else None
    dtype = dtype if dtype in ("float32", "bfloat16") else weight_dtype
    sides = list(kernel.shape[2:])
    if all(side == 1 for side in sides) or sides == list(stride):
        return dtype  # pixels, or patches without overlap: a linear layer
    sample = providers.sample_of(kernel.shape[1], many=kernel.numel() >= MANY_WEIGHTS)
    tiled = providers.by_tiles(kernel.shape, dtype, stride, dilation)
    library = providers.compute_dtype(dtype)
    return dtype if providers.native_is_faster(dtype, library, sample, tiled=tiled, joined=True) else None


def _add(rewriter: Rewriter, node: Node, image: object, residual: object) -> bool:
    """Fuse an addition to the output of a convolution into its epilogue."""
    convolution = _convolution(rewriter, image)
    if convolution is None or not is_tensor(residual) or len(image.users) != 1:  # type: ignore[attr-defined]
        return False
    if argument(convolution, "residual") is not None or argument(convolution, "activation") != "none":
        return False
    if rewriter.is_written(residual) or not is_residual(residual, image, node):  # type: ignore[arg-type]
        return False
    rows = rewriter.call(node, aten.permute.default, residual, _TO_ROWS)
    _put(rewriter, node, rewriter.changed(node, convolution, residual=rows))
    return True


def _activate(rewriter: Rewriter, node: Node) -> bool:
    """Fuse the activation of the output of a convolution, or of its sum, into its epilogue."""
    found = read_activation(rewriter, node)
    if found is None:
        return False
    image, name, users = found
    convolution = _convolution(rewriter, image)
    if convolution is None or len(image.users) != users or argument(convolution, "activation") != "none":
        return False
    _put(rewriter, node, rewriter.changed(node, convolution, activation=name))
    return True


def _put(rewriter: Rewriter, node: Node, convolution: Node) -> None:
    rewriter.replace(node, rewriter.call(node, aten.permute.default, convolution, _TO_IMAGE))


def _convolution(rewriter: Rewriter, image: object) -> Node | None:
    """Return the `conv2d` whose output `image` is, with channels first, if nothing else reads or writes it; else None."""
    if not is_call(image, aten.permute.default) or args_of(image)[1] != _TO_IMAGE:
        return None
    node: Node = args_of(image)[0]
    alone = is_call(node, ours.conv2d.default) and len(node.users) == 1 and not rewriter.is_written(node)
    return node if alone else None
