"""Convolutions over time with gaps between the steps of their kernel (dilation), as vocoders and codecs of sound have them: products
of rows that are gathered while they are packed, as in an image of one row of pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.convolution import conv2d, out_size
from hf_cpu_accel.packing.convolution import pack_conv2d, unpack_conv2d
from hf_cpu_accel.packing.linear import QUANTISED
from hf_cpu_accel.patching.restore import swap_module
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.epilogue import PLAIN, Epilogue
from hf_cpu_accel.rewrite.convolution.folded_norm import waits
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution, padding_of
from hf_cpu_accel.rewrite.core.context import (
    MAX_INTEGER_FEATURES,
    MIN_OUT_FEATURES,
    WEIGHT_DTYPES,
    Context,
    refusal_to_swap,
)
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.packed_source import taken, was_packed
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import disagreement
from hf_cpu_accel.rewrite.linear.match import release
from hf_cpu_accel.runtime import hardware

STRUCTURE = "dilated convolution over time"


class DilatedConvolution(DeferringConvolution, PackedModule):
    """`nn.Conv1d` with gaps: [B, C, L] or [C, L] -> [B, out_channels, L'] or [out_channels, L'], with the channels last in memory.

    Attributes:
        packed: the weight, of a convolution over images of one row.
        padding: zeros on either side of the input, also where the convolution told them in words.
    """

    def __init__(self, original: nn.Conv1d, dtype: str) -> None:
        super().__init__(original)
        weight = original.weight.detach()
        saved = taken(weight)
        self.packed = pack_conv2d(weight[:, :, None], dtype) if saved is None else saved.packed
        padding = padding_of(original)
        assert padding is not None
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.padding, self.dilation = padding, original.dilation
        self.groups, self.padding_mode = original.groups, original.padding_mode

    def forward(self, input: Tensor) -> Tensor:
        """
        Raises:
            RuntimeError: what the convolution would not take either.
        """
        check_inference(self, input)
        input = input.tensor if isinstance(input, LazyTensor) else input
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        fits = input.dim() in (2, 3) and input.shape[-2] == self.in_channels
        if not fits or input.shape[-1] + 2 * self.padding[0] < reach:
            raise RuntimeError(
                f"input of shape {tuple(input.shape)}: this convolution takes [batch, {self.in_channels}, ...] with at least "
                f"{reach} numbers per channel, zeros of {self.padding} on either side included"
            )
        if input.dtype not in WEIGHT_DTYPES:
            raise RuntimeError(f"input in {input.dtype}: accepted are {WEIGHT_DTYPES}")
        return self.run(input) if input.dim() == 3 else self.compute(input[None], PLAIN)[0]

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        residual = epilogue.residual
        output = conv2d(
            input[:, :, None],
            self.packed,
            self.bias,
            kernel_size=(1, *self.kernel_size),
            stride=(1, *self.stride),
            padding=(0, *self.padding),
            dilation=(1, *self.dilation),
            activation=epilogue.activation,
            residual=None if residual is None else residual[:, :, None],
        )
        return output[:, :, 0]

    def supports(self, activation: str, *, residual: bool) -> bool:
        return True

    def output_shape(self, input: Tensor) -> tuple[int, ...]:
        sides = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        (length,) = (out_size(input.shape[2], *side) for side in sides)
        return input.shape[0], self.out_channels, length

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    @property
    def packed_dtype(self) -> str:
        return self.packed.dtype

    def unpack(self) -> Tensor:
        """The dequantised weight, in the shape and dtype of the original."""
        weight = unpack_conv2d(self.packed, (1, *self.kernel_size))[:, :, 0]
        return weight.to(self.weight_dtype, memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, packed={self.packed_dtype}"
        )


class DilatedConvolutionRule:
    """`nn.Conv1d` with gaps, of enough channels."""

    name = "dilated convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not is_convolution(module, nn.Conv1d) or module.dilation == (1,):
            return None
        usual = module.groups == 1 and module.padding_mode == "zeros" and padding_of(module) is not None
        enough = min(module.in_channels, module.out_channels) >= MIN_OUT_FEATURES
        dtype = "int8" if context.dtype_at(path) in QUANTISED else context.dtype_at(path)
        if dtype == "int8" and module.weight[0].numel() > MAX_INTEGER_FEATURES:
            return None
        gains = was_packed(module.weight, self.name, _gains(dtype) or id(module) in context.computed)
        if not (usual and enough and gains and module.weight.dtype in WEIGHT_DTYPES):
            return None
        return Match(module, path, dtype) if refusal_to_swap(module, path, context) is None else None

    def apply(self, match: Match, context: Context) -> Outcome:
        module, dtype = match.module, match.found
        assert isinstance(module, nn.Conv1d)
        packed = DilatedConvolution(module, dtype)
        if context.verifies:
            length = module.dilation[0] * module.kernel_size[0] + 3
            generator = torch.Generator().manual_seed(0)
            input = torch.randn(2, module.in_channels, length, generator=generator).to(module.weight.dtype)
            with torch.no_grad():
                ours, theirs = (layer(input).movedim(1, -1) for layer in (packed, module))
            reason = disagreement(ours, theirs, dtype, module.weight.dtype)
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        packed.waits = waits(module, context)
        swap_module(context.journal, context.slots[id(module)], packed)
        release(module, packed, context)
        nbytes = packed.packed.nbytes
        item = PlanItem(match.path, STRUCTURE, "conv2d", dtype, nbytes, None, provider="ours")
        return Outcome((item,), (module,))


def _gains(dtype: str) -> bool:
    return dtype == "int8" or (dtype == "bfloat16" and hardware.native_bf16_is_fast())
