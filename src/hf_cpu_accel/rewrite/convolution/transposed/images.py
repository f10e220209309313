"""Transposed 2-d convolutions as convolutions: the channels of a pixel of the convolution are a square of the output.

A pixel of the input adds to a kernel of pixels of the output, `stride` apart from pixel to pixel. So a square of stride x stride
pixels is computed from as many pixels of the input as a kernel has squares: a convolution with stride^2 * out_channels features.
In float32 torch's kernel is as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.convolution import conv2d
from hf_cpu_accel.packing.convolution import pack_conv2d, unpack_conv2d
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.convolution import MIN_CHANNELS
from hf_cpu_accel.rewrite.convolution.layer import put_alone
from hf_cpu_accel.rewrite.convolution.transposed.windows import as_kernel, as_windows, margins_of, windows_of
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.packed_source import saved_weight, source_of
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime import hardware

STRUCTURE = "transposed conv2d"
_MOST_WINDOWS = 2  # squares that a kernel covers on each side; gathering more is slower than torch's kernel


class TransposedImages(PackedModule):
    """`nn.ConvTranspose2d`: [B, C, H, W] or [C, H, W] -> [B, out_channels, H', W'], channels last, or [out_channels, H', W'].

    Attributes:
        packed: the weight [stride^2 * out_channels, C, *windows], in the form of `pack_conv2d`.
        windows: pixels of the input, on each side, that a square of the output is computed from.
    """

    def __init__(self, original: nn.ConvTranspose2d, dtype: str) -> None:
        super().__init__(original)
        self.in_channels, self.out_channels, self.groups = original.in_channels, original.out_channels, 1
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.padding, self.output_padding = margins_of(original), original.output_padding
        self.dilation, self.padding_mode = original.dilation, original.padding_mode
        self.windows = windows_of(original.kernel_size, original.stride)
        weight = original.weight.detach()
        saved = saved_weight(weight)
        self.packed = pack_conv2d(as_windows(weight, self.stride), dtype) if saved is None else saved.packed

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        check_inference(self, input)
        input = ordinary(input)
        if output_size is not None:
            return self._as_eager(input, output_size)
        return self._compute(input[None])[0].contiguous() if input.dim() == 3 else self._compute(input)

    def _compute(self, input: Tensor) -> Tensor:
        """Compute the convolution of a batch.

        Raises:
            RuntimeError: the convolution does not support the input either.
        """
        if input.dim() != 4 or input.shape[1] != self.in_channels or min(self._sides(input)) < 1:
            raise RuntimeError(
                f"input of shape {tuple(input.shape)} is not supported: expected [batch, {self.in_channels}, height, width], large "
                f"enough for an output of one pixel after padding={self.padding} is removed from each side"
            )
        if input.dtype not in WEIGHT_DTYPES:
            raise RuntimeError(f"input dtype {input.dtype} is not supported: use one of {WEIGHT_DTYPES}")
        # Repeated in each call, so that writes to the bias take effect.
        bias = None if self.bias is None else self.bias.repeat(math.prod(self.stride))
        around = [size - 1 for size in self.windows]
        squares = conv2d(input, self.packed, bias, kernel_size=self.windows, padding=around).permute(
            0, 2, 3, 1
        )
        cells = squares.unflatten(3, (*self.stride, self.out_channels)).transpose(2, 3)
        output = cells.flatten(3, 4).flatten(1, 2)
        for dim, (margin, size) in enumerate(zip(self.padding, self._sides(input), strict=True), start=1):
            output = output.narrow(dim, margin, size)
        return output.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    def _sides(self, input: Tensor) -> list[int]:
        """Return height and width of the output."""
        sides = zip(
            input.shape[2:], self.stride, self.kernel_size, self.padding, self.output_padding, strict=True
        )
        return [
            (pixels - 1) * step + size - 2 * margin + more if pixels else 0
            for pixels, step, size, margin, more in sides
        ]

    def _as_eager(self, input: Tensor, output_size: Sequence[int]) -> Tensor:
        """Run the convolution with the weight unpacked once, for an output of another size."""
        least = [side - more for side, more in zip(self._sides(input), self.output_padding, strict=True)]
        more = [wanted - side for wanted, side in zip(list(output_size)[-2:], least, strict=True)]
        if not all(0 <= beyond < step for beyond, step in zip(more, self.stride, strict=True)):
            most = [side + step - 1 for side, step in zip(least, self.stride, strict=True)]
            raise ValueError(
                f"output_size={list(output_size)}: this convolution can return {least} to {most}"
            )
        bias = None if self.bias is None else self.bias.to(input.dtype)
        weight = self.weight.to(input.dtype)
        return functional.conv_transpose2d(input, weight, bias, self.stride, self.padding, more)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels, *self.kernel_size)

    @property
    def packed_dtype(self) -> str:
        return self.packed.dtype

    def unpack(self) -> Tensor:
        """Return the dequantized weight, in the shape and dtype of the original."""
        kernel = as_kernel(unpack_conv2d(self.packed, self.windows), self.kernel_size, self.stride)
        return kernel.to(self.weight_dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, packed={self.packed_dtype}"
        )


class TransposedImagesRule:
    """`nn.ConvTranspose2d` that enlarges by two or more, in models with integer weights, or in bfloat16 where the CPU multiplies
    in it."""

    name = "transposed convolution of images"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if (
            not isinstance(module, nn.ConvTranspose2d)
            or type(module).forward is not nn.ConvTranspose2d.forward
        ):
            return None
        reason = refusal_to_swap(module, path, context) or _unsupported_reason(module)
        dtype = None if reason is not None else _dtype(module, path, context)
        return Match(module, path, (dtype, reason))

    def apply(self, match: Match, context: Context) -> Outcome:
        module, (dtype, reason) = match.module, match.data
        assert isinstance(module, nn.ConvTranspose2d)
        if dtype is None:
            reason = reason or f"PyTorch's kernel is as fast in {context.dtypes.at(match.path)}"
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        packed = TransposedImages(module, dtype)
        item = PlanItem(match.path, STRUCTURE, "conv2d", dtype, packed.packed.nbytes, None, provider="ours")
        sizes = [size + 2 * margin + 1 for size, margin in zip(packed.windows, packed.padding, strict=True)]
        return put_alone(match, packed, item, sizes, context)


def _unsupported_reason(module: nn.ConvTranspose2d) -> str | None:
    """Return why the kernels do not support it, or None."""
    features, windows = (
        module.out_channels * math.prod(module.stride),
        windows_of(module.kernel_size, module.stride),
    )
    if module.groups > 1:
        return f"groups={module.groups} is not supported"
    if any(step > 1 for step in module.dilation):
        return f"dilation={module.dilation} is not supported"
    if module.weight.dtype not in WEIGHT_DTYPES:
        return f"weights in {module.weight.dtype} are not supported, only float32 and bfloat16"
    if min(module.in_channels, features) < MIN_CHANNELS:
        return f"{module.in_channels} to {module.out_channels} channels: too few to gain from packing"
    if max(windows) > _MOST_WINDOWS or min(module.stride) < 2:
        return f"kernel_size={tuple(module.kernel_size)}, stride={tuple(module.stride)}: PyTorch's kernel is faster"
    if module.in_channels * math.prod(windows) > MAX_INTEGER_FEATURES:
        return f"integer sums over {module.in_channels} input channels would overflow"
    ends = zip(
        module.kernel_size, margins_of(module), module.output_padding, windows, module.stride, strict=True
    )
    if any(size - margin + more > window * step for size, margin, more, window, step in ends):
        return f"output_padding={module.output_padding} is not supported with this kernel_size and stride"
    return None


def _dtype(module: nn.ConvTranspose2d, path: str, context: Context) -> str | None:
    """Return the dtype of the packed weight, or None where torch's kernel is as fast."""
    saved = source_of(module.weight)
    if saved is not None:  # the faster provider was chosen when the model was packed
        return saved.dtype_of(module.weight, TransposedImagesRule.name)
    dtype = context.dtypes.at(path)
    if dtype in QUANTIZED:
        return "int8"
    return dtype if dtype == "bfloat16" and hardware.native_bf16_is_fast() else None
