"""2-d convolutions by our own GEMM, on patches that are gathered while they are packed.

In int8 all of them: two to four times as fast as any with floating point weights. In floating point those of a thousand channels,
whose images have few pixels: ours is 1.2 to 1.9 times as fast as oneDNN's at 8 x 8 and 16 x 16 pixels, and as fast at 32 x 32. Most
of a UNet lies there, so where the CPU computes bfloat16 no faster than float32, such weights in bfloat16 halve what it takes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hf_cpu_accel import hardware
from hf_cpu_accel.ops.convolution import conv2d, pack_conv2d
from hf_cpu_accel.packing import PackedWeight, unpack_linear
from hf_cpu_accel.rewrite.context import MAX_INTEGER_FEATURES, Context
from hf_cpu_accel.rewrite.epilogue import Epilogue, Fold
from hf_cpu_accel.rewrite.packed_convolution import PackedConvolution, put_in_place, refusal
from hf_cpu_accel.rewrite.rule import Match, Outcome

# With fewer channels most of a panel or of a run of memory is padding, and it is there that images come in and go out.
MIN_CHANNELS = 16
# Patches in 8 bits. Four bits of a weight that is used for every pixel would save nothing.
_QUANTISED = ("int8", "int4")
# Numbers of a weight in floating point: from 1280 x 1280 channels with 3 x 3 pixels on.
MANY_WEIGHTS = 12_000_000


class GemmConvolution(PackedConvolution):
    """A convolution by our GEMM, in "int8", or in "float32" or "bfloat16" where no norm is folded into it.

    Attributes:
        packed: the weight, as `ops.convolution.pack_conv2d` gives it.
    """

    def __init__(self, original: nn.Conv2d, dtype: str, fold: Fold | None) -> None:
        super().__init__(original, fold)
        self.packed = pack_conv2d(original.weight, dtype)
        # In int8 each channel has a scale of its own, so to multiply that is to fold the norm's gain before quantising.
        self._folded: tuple[PackedWeight, Tensor] | None = None
        if fold is not None:
            assert self.packed.scale is not None
            scale, sums = self.packed.scale
            folded = dataclasses.replace(self.packed, scale=torch.stack((scale * fold.gain, sums)))
            self._folded = folded, fold.bias(self.bias)

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        weight, bias = (self._folded if epilogue.normalised else None) or (self.packed, self.bias)
        return conv2d(
            input,
            weight,
            bias,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            activation=epilogue.activation,
            residual=epilogue.residual,
        )

    def supports(self, activation: str, *, residual: bool) -> bool:
        return True

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


class GemmConvolutionRule:
    """`nn.Conv2d` of many channels in models whose weights are packed as integers, and of very many in others."""

    name = "gemm convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is not nn.Conv2d or module.groups != 1:
            return None
        dtype = _weight_dtype(module, context)
        return Match(module, path, dtype) if dtype and refusal(module, path, context) is None else None

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.Conv2d)
        packed = GemmConvolution(module, match.found, context.fold_after(module))
        return put_in_place(match, packed, "conv2d", "ours", context)


def _weight_dtype(module: nn.Conv2d, context: Context) -> str | None:
    """One of `packing.DTYPES`, or None where another rule serves better."""
    if context.dtype in _QUANTISED:
        fits = min(module.in_channels, module.out_channels) >= MIN_CHANNELS
        return "int8" if fits and module.weight[0].numel() <= MAX_INTEGER_FEATURES else None
    gains = context.dtype == "float32" or (context.dtype == "bfloat16" and not hardware.native_bf16_is_fast())
    many = module.weight.numel() >= MANY_WEIGHTS and context.fold_after(module) is None
    return context.dtype if gains and many else None
