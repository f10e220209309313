"""2-d convolutions on prepacked weights, with channels last from the first of them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.packing.convolution import pack_conv2d, pack_grouped
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.convolution import (
    ACTIVATIONS,
    ACTIVATIONS_OF_SUMS,
    MIN_CHANNELS,
    Geometry,
    compute_dtype,
    convolve,
    prepack,
    works,
)
from hf_cpu_accel.rewrite.convolution.deferred import OwnWeight
from hf_cpu_accel.rewrite.convolution.epilogue import Epilogue
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution
from hf_cpu_accel.rewrite.convolution.layer import (
    STRUCTURE,
    PackedConvolution,
    convolution_refusal,
    put_in_place,
)
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.norm_fold import Fold
from hf_cpu_accel.rewrite.core.packed_source import saved_weight
from hf_cpu_accel.rewrite.core.rule import Match, Outcome

# Channels per group that our kernel supports: those of RegNets and ResNeXts. Wider groups are matrix products.
_GROUPS = (1, 2, 4, 8, 16, 32)


class OneDNNConvolution(PackedConvolution):
    """A convolution with its weight in oneDNN's layout.

    Attributes:
        packed: the weight, opaque to torch; its dtype is the compute dtype.
        geometry: stride, padding, dilation and groups of the kernel.
    """

    def __init__(self, original: nn.Conv2d, dtype: torch.dtype, fold: Fold | None) -> None:
        super().__init__(original, fold)
        self.geometry = Geometry(self.padding, self.stride, self.dilation, self.groups)
        self.is_exact = fold is None
        weight = original.weight.detach()
        saved = saved_weight(weight)
        if saved is not None:
            self._lost, plain = saved.lost, saved.packed.data
        else:
            self._lost = None if fold is None else fold.lost(weight)
            plain = (weight if fold is None else fold.weight(weight)).to(dtype)
        self.packed = prepack(plain, self.geometry)
        self._own: PackedWeight | None = None
        self._set_bias()

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        if self.fold is not None and not epilogue.normalized:
            return self._without_norm(input)
        image, residual = self._image(input), epilogue.residual
        if residual is not None:
            residual = self._image(residual)
        output = convolve(image, self.packed, self._bias, self.geometry, epilogue.activation, residual)
        return output.to(input.dtype)

    def own_weight(self, *, normalized: bool) -> OwnWeight | None:
        """Return the weight of a grouped convolution of few channels, or of a small one that reads the image itself, where
        chains of mobile networks begin.

        They have so few weights that a second copy does not matter. Larger ones may take most of the time of a stem: for a
        ResNet's 7 x 7 kernel the faster provider was measured.
        """
        if normalized != (self.fold is not None) or not (self._is_grouped or self._is_first):
            return None
        if self._own is None:
            plain = self.packed.to_dense().float()
            self._own = pack_grouped(plain) if self._is_grouped else pack_conv2d(plain, "float32")
        return self._own, self._bias

    @property
    def _is_grouped(self) -> bool:
        """Return whether the convolution has groups that fill vectors, or that vectors are filled with, and is not depthwise."""
        channels = self.in_channels // self.groups
        if self.in_channels != self.out_channels or channels not in _GROUPS:
            return False
        usual = self.kernel_size == (3, 3) and self.dilation == (1, 1) and max(self.stride) <= 2
        return channels == 1 or (usual and self.groups > 1)

    @property
    def _is_first(self) -> bool:
        return self.groups == 1 and self.in_channels < MIN_CHANNELS and max(self.kernel_size) <= 3

    def supports(self, activation: str, *, residual: bool) -> bool:
        return activation in ACTIVATIONS_OF_SUMS if residual else activation in ACTIVATIONS

    def _image(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.packed.dtype, memory_format=torch.channels_last)

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    @property
    def packed_dtype(self) -> str:
        return str(self.packed.dtype).removeprefix("torch.")

    def unpack(self) -> Tensor:
        """Return the weight in the shape and dtype of the original."""
        weight = self.packed.to_dense()
        if self.fold is not None:
            assert self._lost is not None
            weight = self.fold.unfolded(weight, self._lost)
        return weight.to(self.weight_dtype)

    @property
    def copies_bias(self) -> bool:
        return super().copies_bias or (self.bias is not None and self.bias.dtype is not self.packed.dtype)

    def _set_bias(self) -> None:
        # In the dtype of the weight, as oneDNN requires.
        bias = self.bias if self.fold is None else self.fold.bias(self.bias)
        self._bias = None if bias is None else bias.detach().to(self.packed.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OneDNNConvolution:
        super()._apply(fn, recurse)
        self._set_bias()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have the plain weight, since torch can do neither with an opaque one.
        return {**self.__dict__, "packed": self.packed.to_dense(), "_own": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed = prepack(self.packed, self.geometry)


class ConvolutionRule:
    """`nn.Conv2d` that oneDNN supports: weights in float32 or bfloat16, padded with zeros."""

    name = "convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not is_convolution(module, nn.Conv2d):
            return None
        reason = convolution_refusal(module, path, context)
        if reason is None and all(size == 1 for size in module.kernel_size):
            # oneDNN's layout for these depends on the size of the image, and another layout is converted in every call.
            reason = "a kernel of one pixel is a plain matrix product: packing gains nothing"
        if reason is None and not works(compute_dtype(context.dtypes.at(path))):
            reason = "oneDNN's convolution is not available on this machine"
        return Match(module, path, reason)

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.Conv2d)
        if match.data is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, match.data),), (module,))
        dtype = compute_dtype(context.dtypes.at(match.path))
        packed = OneDNNConvolution(module, dtype, context.fold_after(module))
        return put_in_place(match, packed, "convolution", "oneDNN", context)
