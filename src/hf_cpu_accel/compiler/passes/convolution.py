"""Convolutions of images, and over time, with their channels last; with what is added to them, and the activation behind: `conv2d`.

Each comes between two permutations that are views: from one convolution to the next, through pointwise operations, norms and
joins, images stay with their channels last, and are not permuted.
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
        return 0  # they would have to stay views, and images are about to lie in another order
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
    made = rewriter.call(
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
    made = rewriter.call(node, aten.permute.default, made, _TO_IMAGE)
    if image.dim() == 3:
        made = rewriter.call(node, aten.squeeze.dim, made, 2)
    rewriter.replace(node, made)
    return True


def _dtype(
    rewriter: Rewriter, node: Node, kernel: torch.Tensor, stride: list[int], dilation: list[int]
) -> str | None:
    """As what to pack the weight; None where the library's convolution is faster.

    It keeps no weight in its own layout here, which would be no plain tensor; that it has to reorder the weight in every call is
    what `joined` stands for.
    """
    own = str(kernel.dtype).removeprefix("torch.")
    dtype = rewriter.dtype or node.meta.get(PACKED_AS, own)
    if dtype in ("int8", "int4"):
        return "int8" if kernel[0].numel() <= MAX_INTEGER_FEATURES else None
    dtype = dtype if dtype in ("float32", "bfloat16") else own
    sides = list(kernel.shape[2:])
    if all(side == 1 for side in sides) or sides == list(stride):
        return dtype  # pixels, or patches that each pixel belongs to one of: a linear layer
    sample = providers.sample_of(kernel.shape[1], many=kernel.numel() >= MANY_WEIGHTS)
    tiled = providers.by_tiles(kernel.shape, dtype, stride, dilation)
    library = providers.compute_dtype(dtype)
    return dtype if providers.native_is_faster(dtype, library, sample, tiled=tiled, joined=True) else None


def _add(rewriter: Rewriter, node: Node, image: object, residual: object) -> bool:
    """What is added to the output of a convolution: into its epilogue."""
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
    """The activation of the output of a convolution, sum included: into its epilogue."""
    found = read_activation(rewriter, node)
    if found is None:
        return False
    image, name, users = found
    convolution = _convolution(rewriter, image)
    if convolution is None or len(image.users) != users or argument(convolution, "activation") != "none":
        return False
    _put(rewriter, node, rewriter.changed(node, convolution, activation=name))
    return True


def _put(rewriter: Rewriter, node: Node, made: Node) -> None:
    rewriter.replace(node, rewriter.call(node, aten.permute.default, made, _TO_IMAGE))


def _convolution(rewriter: Rewriter, image: object) -> Node | None:
    """The call of ours whose output `image` is, channels in front, if nothing else reads or writes it."""
    if not is_call(image, aten.permute.default) or args_of(image)[1] != _TO_IMAGE:
        return None
    made: Node = args_of(image)[0]
    alone = is_call(made, ours.conv2d.default) and len(made.users) == 1 and not rewriter.is_written(made)
    return made if alone else None
