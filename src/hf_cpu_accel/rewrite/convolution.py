"""2-d convolutions on prepacked weights, with the channels of a pixel together from the first of them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import hardware
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.convolution import Geometry, convolve, prepack, works
from hf_cpu_accel.rewrite.context import Context
from hf_cpu_accel.rewrite.packed_convolution import STRUCTURE, PackedConvolution, put_in_place, refusal
from hf_cpu_accel.rewrite.rule import Match, Outcome

_COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OneDNNConvolution(PackedConvolution):
    """A convolution with its weight in oneDNN's layout.

    Attributes:
        packed: the weight, opaque to torch; its dtype is the one that is computed in.
        geometry: how the kernel moves.
    """

    def __init__(self, original: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__(original)
        self.geometry = Geometry(self.padding, self.stride, self.dilation, self.groups)
        self.packed = prepack(original.weight.detach().to(dtype), self.geometry)
        self._set_bias()

    def convolve(self, input: Tensor) -> Tensor:
        image = input.to(self.packed.dtype, memory_format=torch.channels_last)
        return convolve(image, self.packed, self._bias, self.geometry).to(input.dtype)

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    @property
    def packed_dtype(self) -> str:
        return str(self.packed.dtype).removeprefix("torch.")

    def unpack(self) -> Tensor:
        """The weight in the shape and dtype of the original."""
        return self.packed.to_dense().to(self.weight_dtype)

    def _set_bias(self) -> None:
        # In the dtype of the weight, as oneDNN wants it.
        self._bias = None if self.bias is None else self.bias.detach().to(self.packed.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OneDNNConvolution:
        super()._apply(fn, recurse)
        self._set_bias()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have the plain weight, since torch can do neither with an opaque one.
        return {**self.__dict__, "packed": self.packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed = prepack(self.packed, self.geometry)


class ConvolutionRule:
    """`nn.Conv2d` that oneDNN can take: weights in float32 or bfloat16, padded with zeros."""

    name = "convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is not nn.Conv2d:
            return None
        reason = refusal(module, path, context)
        if reason is None and all(size == 1 for size in module.kernel_size):
            # Which layout oneDNN wants for these depends on the size of the image, and the wrong one is turned in every call.
            reason = "it covers one pixel: a plain product, which gains nothing from another layout"
        if reason is None and not works(_COMPUTE[compute_dtype(context.dtype)]):
            reason = "oneDNN's convolution does not work here"
        return Match(module, path, reason)

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.Conv2d)
        if match.found is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, match.found),), (module,))
        dtype = compute_dtype(context.dtype)
        packed = OneDNNConvolution(module, _COMPUTE[dtype])
        reason = put_in_place(module, packed, context)
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        item = PlanItem(match.path, STRUCTURE, "convolution", dtype, packed.nbytes, None, provider="oneDNN")
        return Outcome((item,), (module,))


def compute_dtype(dtype: str) -> str:
    """What convolutions are computed in where linears are packed as `dtype`: bfloat16 only where the CPU is faster with it.

    oneDNN takes bfloat16 to the CPU's own dot products, which some CPUs run at half the rate of float32.
    """
    return "float32" if dtype == "float32" or not hardware.native_bf16_is_fast() else "bfloat16"
