"""1-d convolutions as convolutions of images of one row: dilated ones, as in vocoders and audio codecs, and others in float32.

The kernel of this package gathers its input while packing it: on a Zen 4, int8 is four times and bfloat16 twice as fast as
torch's kernel. torch's kernel converts the weight and the audio to other layouts in each call, in float32, too. In float32,
oneDNN with a prepacked weight is faster for few channels. For many channels it takes twenty times as long if the audio is
shorter or longer than the layout expects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.convolution import conv2d, out_size
from hf_cpu_accel.packing.convolution import IMAGE_CHANNELS, pack_conv2d, unpack_conv2d
from hf_cpu_accel.packing.linear import QUANTIZED, PackedWeight
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.convolution import (
    ACTIVATIONS,
    ACTIVATIONS_OF_SUMS,
    Geometry,
    convolve,
    prepack,
    works,
)
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution
from hf_cpu_accel.rewrite.convolution.epilogue import PLAIN, Epilogue
from hf_cpu_accel.rewrite.convolution.folded_norm import waits
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution, symmetric_padding
from hf_cpu_accel.rewrite.convolution.layer import put_alone
from hf_cpu_accel.rewrite.convolution.sound import is_repeated
from hf_cpu_accel.rewrite.core.context import (
    MAX_INTEGER_FEATURES,
    MIN_OUT_FEATURES,
    WEIGHT_DTYPES,
    Context,
    refusal_to_swap,
)
from hf_cpu_accel.rewrite.core.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.core.packed_source import saved_weight, source_of
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime import hardware

STRUCTURE = "conv1d"
# oneDNN's layouts for these are close enough to one another.
_FEW_CHANNELS = 64


class ConvolutionOverTime(DeferringConvolution, PackedModule):
    """`nn.Conv1d` without groups: [B, C, L] or [C, L] -> [B, out_channels, L'] or [out_channels, L'], with channels last in
    memory.

    Attributes:
        packed: the weight: in float32 of few channels in oneDNN's layout, else in the form of `pack_conv2d`.
        padding: zeros on either side of the input, also if the convolution has `padding="same"`.
    """

    packed: PackedWeight | Tensor

    def __init__(self, original: nn.Conv1d, dtype: str) -> None:
        super().__init__(original)
        padding = symmetric_padding(original)
        assert padding is not None
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.padding, self.dilation = padding, original.dilation
        self.groups, self.padding_mode = original.groups, original.padding_mode
        weight = original.weight.detach()[:, :, None]
        saved = saved_weight(original.weight.detach())
        if _is_by_library(original, dtype):
            plain = weight.float() if saved is None else saved.packed.data
            self.packed = prepack(plain, self._geometry)
        else:
            self.packed = pack_conv2d(weight, dtype) if saved is None else saved.packed

    def forward(self, input: Tensor) -> Tensor:
        """Run the convolution.

        Raises:
            RuntimeError: the convolution does not support the input either.
        """
        check_inference(self, input)
        input = input.tensor if isinstance(input, LazyTensor) else input
        reach = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        fits = input.dim() in (2, 3) and input.shape[-2] == self.in_channels
        if not fits or input.shape[-1] + 2 * self.padding[0] < reach:
            raise RuntimeError(
                f"input of shape {tuple(input.shape)} is not supported: expected [batch, {self.in_channels}, ...] with at least "
                f"{reach} values per channel, including padding={self.padding} on each side"
            )
        if input.dtype not in WEIGHT_DTYPES:
            raise RuntimeError(f"input dtype {input.dtype} is not supported: use one of {WEIGHT_DTYPES}")
        return self.run(input) if input.dim() == 3 else self.compute(input[None], PLAIN)[0]

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        image, residual = input[:, :, None], epilogue.residual
        residual = None if residual is None else residual[:, :, None]
        geometry = self._geometry
        if isinstance(self.packed, Tensor):
            image = image.to(torch.float32, memory_format=torch.channels_last)
            bias = None if self.bias is None else self.bias.float()
            if residual is not None:
                residual = residual.to(torch.float32, memory_format=torch.channels_last)
            output = convolve(image, self.packed, bias, geometry, epilogue.activation, residual)
            return output[:, :, 0].to(input.dtype)
        output = conv2d(
            image,
            self.packed,
            self.bias,
            kernel_size=(1, *self.kernel_size),
            stride=geometry.stride,
            padding=geometry.padding,
            dilation=geometry.dilation,
            activation=epilogue.activation,
            residual=residual,
        )
        return output[:, :, 0]

    def supports(self, activation: str, *, residual: bool) -> bool:
        known = ACTIVATIONS_OF_SUMS if residual else ACTIVATIONS
        return isinstance(self.packed, PackedWeight) or activation in known

    def output_shape(self, input: Tensor) -> tuple[int, ...]:
        sides = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        (length,) = (out_size(input.shape[2], *side) for side in sides)
        return input.shape[0], self.out_channels, length

    @property
    def _geometry(self) -> Geometry:
        return Geometry((0, self.padding[0]), (1, self.stride[0]), (1, self.dilation[0]), 1)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    @property
    def packed_dtype(self) -> str:
        return self.packed.dtype if isinstance(self.packed, PackedWeight) else "float32"

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes if isinstance(self.packed, PackedWeight) else 4 * self.packed.numel()

    def plain(self) -> Tensor:
        """Return the dequantized weight as that of an image of one row, float32."""
        if isinstance(self.packed, PackedWeight):
            return unpack_conv2d(self.packed, (1, *self.kernel_size))
        return self.packed.to_dense()

    def unpack(self) -> Tensor:
        """Return the dequantized weight, in the shape and dtype of the original."""
        return self.plain()[:, :, 0].to(self.weight_dtype, memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, packed={self.packed_dtype}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have the plain weight, since torch can do neither with an opaque one.
        packed = self.packed
        return {**self.__dict__, "packed": packed if isinstance(packed, PackedWeight) else packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.packed, Tensor):
            self.packed = prepack(self.packed, self._geometry)


class ConvolutionOverTimeRule:
    """`nn.Conv1d` of enough channels, dilated or, in float32, next to others; linears match their cases before."""

    name = "convolution over time"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not is_convolution(module, nn.Conv1d) or module.kernel_size == (1,):
            return None
        usual = (
            module.groups == 1 and module.padding_mode == "zeros" and symmetric_padding(module) is not None
        )
        enough = min(module.in_channels, module.out_channels) >= MIN_OUT_FEATURES
        if not (usual and enough and module.weight.dtype in WEIGHT_DTYPES):
            return None
        dtype = _weight_dtype(module, path, context)
        if dtype is None or refusal_to_swap(module, path, context) is not None:
            return None
        return Match(module, path, dtype)

    def apply(self, match: Match, context: Context) -> Outcome:
        module, dtype = match.module, match.data
        assert isinstance(module, nn.Conv1d)
        packed = ConvolutionOverTime(module, dtype)
        packed.waits = waits(module, context)
        library = _is_by_library(module, dtype)
        op, provider = ("convolution", "oneDNN") if library else ("conv2d", "ours")
        item = PlanItem(match.path, STRUCTURE, op, dtype, packed.nbytes, None, provider=provider)
        return put_alone(match, packed, item, [module.dilation[0] * module.kernel_size[0] + 3], context)


def _weight_dtype(module: nn.Conv1d, path: str, context: Context) -> str | None:
    """Return "float32", "bfloat16" or "int8", or None where torch's kernel is as fast."""
    saved = source_of(module.weight)
    if saved is not None:  # the faster provider was chosen when the model was packed
        return saved.dtype_of(module.weight, ConvolutionOverTimeRule.name)
    dtype = context.dtypes.at(path)
    if dtype in QUANTIZED:
        fits = module.in_channels % IMAGE_CHANNELS == 0 and module.weight[0].numel() <= MAX_INTEGER_FEATURES
        # Input that is not quantized once for all windows takes longer in int8 than in bfloat16.
        dtype = "int8" if fits else "bfloat16"
    if dtype == "bfloat16" and not hardware.native_bf16_is_fast():
        dtype = "float32"
    if dtype != "float32":
        return dtype if module.dilation != (1,) else None
    if _is_by_library(module, dtype) and not works(torch.float32):
        return None
    return dtype if _gains(module, path, context) else None


def _is_by_library(module: nn.Conv1d, dtype: str) -> bool:
    return dtype == "float32" and max(module.in_channels, module.out_channels) <= _FEW_CHANNELS


def _gains(module: nn.Conv1d, path: str, context: Context) -> bool:
    """Return whether float32 gains: if the weight would be computed in each call, or between others of its kind, whose output
    has the layout that they read. A norm with channels first would transpose it."""
    if id(module) in context.weights.computed:
        return True
    siblings = [child for parent, _ in context.tree.slots[id(module)] for child in parent.children()]
    turns = any(isinstance(child, _NormBase | nn.GroupNorm) for child in siblings)
    return not turns and is_repeated(path, context)
