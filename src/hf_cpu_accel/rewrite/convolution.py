"""2-d convolutions on prepacked weights, with the channels of a pixel together from the first of them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel import hardware
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.convolution import Geometry, convolve, prepack, works
from hf_cpu_accel.rewrite.changes import swap_module
from hf_cpu_accel.rewrite.context import WEIGHT_DTYPES, Context, is_plain
from hf_cpu_accel.rewrite.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.linear import free
from hf_cpu_accel.rewrite.packed_module import PackedModule, check_inference
from hf_cpu_accel.rewrite.rule import Match, Outcome
from hf_cpu_accel.rewrite.verify import disagreement

STRUCTURE = "convolution"
_COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedConvolution(PackedModule):
    """`nn.Conv2d` with its weight in oneDNN's layout: [N, C, H, W] -> [N, out_channels, H', W'], channels last, dtype of the input.

    Attributes:
        packed: the weight, opaque to torch; its dtype is the one that is computed in.
        geometry: how the kernel moves.
    """

    def __init__(self, original: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__(original)
        assert not isinstance(original.padding, str)
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.kernel_size, self.padding_mode = original.kernel_size, original.padding_mode
        self.stride, self.padding, self.dilation = original.stride, original.padding, original.dilation
        self.groups = original.groups
        self.geometry = Geometry(pair(self.padding), pair(self.stride), pair(self.dilation), self.groups)
        self.packed = prepack(original.weight.detach().to(dtype), self.geometry)
        self._set_bias()

    def forward(self, input: Tensor) -> Tensor:
        check_inference(self, input)
        input = input.tensor if isinstance(input, LazyTensor) else input
        if input.dim() != 4:
            return self.forward(input[None])[0].contiguous()
        input_dtype = input.dtype
        input = input.to(self.packed.dtype, memory_format=torch.channels_last)
        output = convolve(input, self.packed, self._bias, self.geometry)
        return output.to(input_dtype)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    def unpack(self) -> Tensor:
        """The weight in the shape and dtype of the original."""
        return self.packed.to_dense().to(self.weight_dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, packed={self.packed.dtype}"
        )

    def _set_bias(self) -> None:
        # In the dtype of the weight, as oneDNN wants it.
        self._bias = None if self.bias is None else self.bias.detach().to(self.packed.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedConvolution:
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
        packed = PackedConvolution(module, _COMPUTE[dtype])
        reason = put_in_place(module, packed, dtype, context)
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        item = PlanItem(match.path, STRUCTURE, "convolution", dtype, packed.nbytes, None, provider="oneDNN")
        return Outcome((item,), (module,))


def put_in_place(module: nn.Conv2d, packed: PackedModule, dtype: str, context: Context) -> str | None:
    """Compare `packed` with the convolution that it stands for, and swap it in; or say why not."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    reason = _disagreement(packed, module, dtype) if context.config.verify else None
    if reason is not None:
        return reason
    swap_module(context.journal, context.slots[id(module)], packed)
    if context.is_tied(weight) or context.config.originals == "memory":
        packed.keep_original(weight)
    else:
        free(weight, packed, dtype, context)
    return None


def compute_dtype(dtype: str) -> str:
    """What convolutions are computed in where linears are packed as `dtype`: bfloat16 only where the CPU is faster with it.

    oneDNN takes bfloat16 to the CPU's own dot products, which some CPUs run at half the rate of float32.
    """
    return "float32" if dtype == "float32" or not hardware.native_bf16_is_fast() else "bfloat16"


def refusal(module: nn.Conv2d, path: str, context: Context) -> str | None:
    """Why this convolution is not packed, or None if it can be."""
    if not is_plain(module):
        return "it has hooks, parametrizations or a forward of its own"
    if context.skipped(path):
        return "skip_modules"
    if module is context.root:
        return "it is the target itself, and has no parent to hang the packed layer in"
    if module.weight.dtype not in WEIGHT_DTYPES:
        return f"weights in {module.weight.dtype} are not supported, only float32 and bfloat16"
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"padding {module.padding_mode!r}, {module.padding!r} is not supported, only numbers of zeros"
    return None


def _disagreement(packed: nn.Module, module: nn.Conv2d, dtype: str) -> str | None:
    """On an image a little larger than the kernel."""
    reach = [(size - 1) * step + 3 for size, step in zip(module.kernel_size, module.dilation, strict=True)]
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(1, module.in_channels, *reach, generator=generator).to(module.weight.dtype)
    with torch.no_grad():
        ours, theirs = packed(input), module(input)
    return disagreement(ours.movedim(1, -1), theirs.movedim(1, -1), dtype, module.weight.dtype)


def pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width
