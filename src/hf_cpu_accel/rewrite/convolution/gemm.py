"""2-d convolutions by the GEMM of this package, on tiles of the image, or on patches that are gathered while packing.

In int8 all of them use it: two to four times as fast as with floating point weights. In floating point it runs those that were
measured to be as fast as oneDNN. By tiles (winograd.py) it is faster on nearly every CPU. Otherwise that differs between CPUs,
and between convolutions of many pixels and those of a thousand channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.convolution import conv2d
from hf_cpu_accel.packing.convolution import pack_conv2d, unpack_conv2d
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.providers.convolution import (
    MIN_CHANNELS,
    by_tiles,
    compute_dtype,
    native_is_faster,
    sample_of,
)
from hf_cpu_accel.rewrite.convolution.deferred import OwnWeight
from hf_cpu_accel.rewrite.convolution.epilogue import Epilogue
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution, symmetric_padding
from hf_cpu_accel.rewrite.convolution.layer import PackedConvolution, convolution_refusal, put_in_place
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, Context
from hf_cpu_accel.rewrite.core.norm_fold import Fold
from hf_cpu_accel.rewrite.core.packed_source import saved_weight, source_of
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime import hardware

# Patches in 8 bits. Four bits of a weight that is used for every pixel would save nothing.
_QUANTIZED = ("int8", "int4")
# Numbers of a weight in floating point: from 1280 x 1280 channels with 3 x 3 pixels on.
MANY_WEIGHTS = 12_000_000


class GemmConvolution(PackedConvolution):
    """A convolution by the GEMM of this package.

    Attributes:
        packed: the weight in the form of `pack_conv2d`; in floating point it includes the norm's gain, if there is a norm.
    """

    def __init__(self, original: nn.Conv2d, dtype: str, fold: Fold | None) -> None:
        super().__init__(original, fold)
        weight = original.weight.detach()
        scaled = dtype in QUANTIZED  # each channel has its own scale, which includes the norm's gain
        folded = None if scaled else fold
        tiled = _takes_tiles(original, dtype)
        self.is_exact = folded is None and not tiled
        saved = saved_weight(weight)
        if saved is not None:
            self._lost, self.packed = saved.lost, saved.packed
        else:
            self._lost = None if folded is None else folded.lost(weight)
            self.packed = pack_conv2d(weight if folded is None else folded.weight(weight), dtype, tiled=tiled)
        self._normalized = self._with_norm()

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        own = self.own_weight(normalized=epilogue.normalized)
        if own is None:
            return self._without_norm(input)
        return conv2d(
            input,
            *own,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            activation=epilogue.activation,
            residual=epilogue.residual,
        )

    def own_weight(self, *, normalized: bool) -> OwnWeight | None:
        if normalized:
            return self._normalized
        return (self.packed, self.bias) if self._lost is None else None

    def _with_norm(self) -> OwnWeight | None:
        if self.fold is None:
            return None
        packed = self.packed
        if packed.scale is not None:
            scale, sums = packed.scale
            packed = dataclasses.replace(packed, scale=torch.stack((scale * self.fold.gain, sums)))
        return packed, self.fold.bias(self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GemmConvolution:
        super()._apply(fn, recurse)
        self._normalized = self._with_norm()
        return self

    def supports(self, activation: str, *, residual: bool) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def packed_dtype(self) -> str:
        return self.packed.dtype

    def unpack(self) -> Tensor:
        """Return the dequantized weight, in the shape and dtype of the original."""
        weight = unpack_conv2d(self.packed, self.kernel_size)
        if self._lost is not None:
            assert self.fold is not None
            weight = self.fold.unfolded(weight, self._lost)
        return weight.to(self.weight_dtype, memory_format=torch.contiguous_format)


class GemmConvolutionRule:
    """`nn.Conv2d` of many channels in models with integer weights; in other models, where this GEMM was measured to be faster,
    or, without measuring, by tiles and with a thousand channels."""

    name = "gemm convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not is_convolution(module, nn.Conv2d) or module.groups != 1:
            return None
        dtype = _weight_dtype(module, path, context)
        return (
            Match(module, path, dtype)
            if dtype and convolution_refusal(module, path, context) is None
            else None
        )

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.Conv2d)
        packed = GemmConvolution(module, match.data, context.fold_after(module))
        return put_in_place(match, packed, "conv2d", "ours", context)


def _weight_dtype(module: nn.Conv2d, path: str, context: Context) -> str | None:
    """Return one of `packing.DTYPES`, or None where another rule is faster."""
    saved = source_of(module.weight)
    if saved is not None:  # the faster provider was chosen when the model was packed
        return saved.dtype_of(module.weight, GemmConvolutionRule.name)
    dtype, few = context.dtypes.at(path), module.in_channels < MIN_CHANNELS
    if dtype not in (*_QUANTIZED, "float32", "bfloat16") or module.out_channels < MIN_CHANNELS:
        return None
    if dtype in _QUANTIZED and not few:
        return None if module.weight[0].numel() > MAX_INTEGER_FEATURES else "int8"
    if few and dtype != "float32":
        dtype = "bfloat16"  # int8 would cost more than it saves
    if all(size == 1 for size in module.kernel_size):
        return None  # pointwise ones are linears
    if _cuts_patches(module):
        return None if few else dtype
    many, tiled = module.weight.numel() >= MANY_WEIGHTS, _takes_tiles(module, dtype)
    # Convolutions of a quantized graph join in any case.
    joined = context.fold_after(module) is not None or id(module.weight) in context.weights.created
    if context.measured:
        sample, library = sample_of(module.in_channels, many=many), compute_dtype(dtype)
        return dtype if native_is_faster(dtype, library, sample, tiled=tiled, joined=joined) else None
    # Without measuring: where bfloat16 is no faster than float32, bfloat16 weights halve the time of such a convolution.
    gains = dtype == "float32" or not hardware.native_bf16_is_fast()
    return dtype if tiled or (many and gains and not joined) else None


def _takes_tiles(module: nn.Conv2d, dtype: str) -> bool:
    return by_tiles(module.weight.shape, dtype, module.stride, module.dilation)


def _cuts_patches(module: nn.Conv2d) -> bool:
    """Return whether each pixel belongs to one patch, so that packing copies the image in another order without gathering."""
    dense = all(step == 1 for step in module.dilation)
    return module.kernel_size == module.stride and dense and symmetric_padding(module) == (0, 0)
