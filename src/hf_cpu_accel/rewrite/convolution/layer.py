"""Base class of modules that replace an `nn.Conv2d`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.convolution import out_size
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.epilogue import NORMALIZED, PLAIN
from hf_cpu_accel.rewrite.convolution.folded_norm import norm_item, swap_norm, waits
from hf_cpu_accel.rewrite.convolution.geometry import symmetric_padding
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.norm_fold import Fold
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.linear.match import release
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "convolution"


class PackedConvolution(DeferringConvolution, PackedModule):
    """[N, C, H, W] or [C, H, W] -> [N, out_channels, H', W'], channels last, or [out_channels, H', W']; dtype of the input.

    It has the attributes of `nn.Conv2d`; sizes that may be one number or a word there are pairs here.
    """

    def __init__(self, original: nn.Conv2d, fold: Fold | None) -> None:
        super().__init__(original)
        padding = symmetric_padding(original)
        assert padding is not None
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.groups, self.padding_mode = original.groups, original.padding_mode
        self.kernel_size, self.stride = _pair(original.kernel_size), _pair(original.stride)
        self.padding, self.dilation = _pair(padding), _pair(original.dilation)
        self.fold = fold

    def forward(self, input: Tensor) -> Tensor:
        check_inference(self, input)
        input = ordinary(input)
        if input.dim() == 3:
            return self.compute(input[None], PLAIN)[0].contiguous()
        return self.run(input)

    def output_shape(self, input: Tensor) -> tuple[int, int, int, int] | None:
        if input.dim() != 4 or input.shape[1] != self.in_channels:
            return None
        sides = zip(input.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        height, width = (out_size(*side) for side in sides)
        return (input.shape[0], self.out_channels, height, width) if height > 0 and width > 0 else None

    def _without_norm(self, input: Tensor) -> Tensor:
        """Run the convolution alone, as eager PyTorch does, if the packed weight includes the norm."""
        weight, bias = self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype)
        output = functional.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return output.contiguous(memory_format=torch.channels_last)

    @property
    def copies_bias(self) -> bool:
        return self.fold is not None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the packed weight."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, packed={self.packed_dtype}"
        )


def convolution_refusal(module: nn.Conv2d, path: str, context: Context) -> str | None:
    """Return why this convolution is not packed, or None if it can be."""
    fixed = refusal_to_swap(module, path, context)
    if fixed is not None:
        return fixed
    if module.weight.dtype not in WEIGHT_DTYPES:
        return f"weights in {module.weight.dtype} are not supported, only float32 and bfloat16"
    if module.padding_mode != "zeros":
        return f"padding {module.padding_mode!r} is not supported, only zeros"
    if symmetric_padding(module) is None:
        return "padding='same' with an even kernel is not supported: it pads one side more than the other"
    return None


def put_in_place(
    match: Match, packed: PackedConvolution, op: str, provider: str, context: Context
) -> Outcome:
    """Compare `packed`, with its folded norm, with the original convolution, and swap it in or return the reason why not."""
    module = match.module
    assert isinstance(module, nn.Conv2d)
    reason = _disagreement(packed, module, context) if context.verifies else None
    if reason is not None:
        return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
    packed.waits = waits(module, context)
    context.swap(module, packed)
    release(module, packed, context)
    item = PlanItem(match.path, STRUCTURE, op, packed.packed_dtype, packed.nbytes, None, provider=provider)
    after = context.norms_after.get(id(module))
    if after is None:
        return Outcome((item,), (module,))
    swap_norm(after, context)
    return Outcome((item, norm_item(after, op, packed.packed_dtype, provider)), (module, after.norm))


def put_alone(
    match: Match, packed: PackedModule, item: PlanItem, sizes: Sequence[int], context: Context
) -> Outcome:
    """Compare `packed` with the original convolution on two inputs of these sizes, and swap it in or return the reason why not.

    Args:
        item: row of the plan, if it is swapped in.
    """
    module: Any = match.module
    if context.verifies:
        generator, dtype = torch.Generator().manual_seed(0), module.weight.dtype
        input = torch.randn(2, module.in_channels, *sizes, generator=generator).to(dtype)
        with torch.no_grad():
            ours, theirs = (layer(input) for layer in (packed, module))
        reason = compare(ours, theirs, dim=1).reason(PACKED.of(packed.packed_dtype, dtype))
        if reason is not None:
            return Outcome((PlanItem.left(match.path, item.structure, reason),), (module,))
    context.swap(module, packed)
    release(module, packed, context)
    return Outcome((item,), (module,))


def _disagreement(packed: PackedConvolution, module: nn.Conv2d, context: Context) -> str | None:
    """Return the difference on an image a little larger than the kernel, or None."""
    reach = [(size - 1) * step + 3 for size, step in zip(module.kernel_size, module.dilation, strict=True)]
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(1, module.in_channels, *reach, generator=generator).to(module.weight.dtype)
    after = context.norms_after.get(id(module))
    with torch.no_grad():
        ours = packed.compute(input, PLAIN if after is None else NORMALIZED)
        theirs = module(input) if after is None else after.norm(module(input))
    return compare(ours, theirs, dim=1).reason(PACKED.of(packed.packed_dtype, module.weight.dtype))


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width
