"""2-d convolutions with int8 weights, by our own GEMM: two to four times as fast as any with floating point weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.convolution import conv2d, pack_conv2d
from hf_cpu_accel.packing import unpack_linear
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.context import MAX_INTEGER_FEATURES, Context
from hf_cpu_accel.rewrite.packed_convolution import STRUCTURE, PackedConvolution, put_in_place, refusal
from hf_cpu_accel.rewrite.rule import Match, Outcome

# With fewer channels most of a panel or of a run of memory is padding, and it is there that images come in and go out.
MIN_CHANNELS = 16
# Patches in 8 bits. Four bits of a weight that is used for every pixel would save nothing.
_QUANTISED = ("int8", "int4")


class QuantizedConvolution(PackedConvolution):
    """A convolution in int8.

    Attributes:
        packed: the weight, as `ops.convolution.pack_conv2d` gives it.
    """

    def __init__(self, original: nn.Conv2d) -> None:
        super().__init__(original)
        self.packed = pack_conv2d(original.weight, "int8")

    def convolve(self, input: Tensor) -> Tensor:
        return conv2d(
            input,
            self.packed,
            self.bias,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def packed_dtype(self) -> str:
        return self.packed.dtype

    def unpack(self) -> Tensor:
        """The dequantised weight, in the shape and dtype of the original."""
        rows = unpack_linear(self.packed).view(self.out_channels, *self.kernel_size, self.in_channels)
        return rows.permute(0, 3, 1, 2).to(self.weight_dtype, memory_format=torch.contiguous_format)


class QuantizedConvolutionRule:
    """`nn.Conv2d` of many channels in models whose weights are packed as integers; all others are another rule's."""

    name = "quantized convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is not nn.Conv2d or context.dtype not in _QUANTISED or module.groups != 1:
            return None
        fits = min(module.in_channels, module.out_channels) >= MIN_CHANNELS
        if not fits or module.weight[0].numel() > MAX_INTEGER_FEATURES:
            return None
        return Match(module, path, None) if refusal(module, path, context) is None else None

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.Conv2d)
        packed = QuantizedConvolution(module)
        reason = put_in_place(module, packed, context)
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        item = PlanItem(match.path, STRUCTURE, "conv2d", packed.packed_dtype, packed.nbytes, reason=None)
        return Outcome((item,), (module,))
