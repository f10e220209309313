"""Convolutions as linears over a view of their input: patches and pixels of images and video, and 1-d convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.convolution import out_size
from hf_cpu_accel.packing.linear import QUANTIZED, pack_linear
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferringConvolution, OwnWeight
from hf_cpu_accel.rewrite.convolution.epilogue import NORMALIZED, PLAIN, Epilogue
from hf_cpu_accel.rewrite.convolution.folded_norm import norm_item, swap_norm, waits
from hf_cpu_accel.rewrite.convolution.geometry import (
    Convolution,
    is_convolution,
    joins_chain,
    symmetric_padding,
)
from hf_cpu_accel.rewrite.convolution.sound import follows_sound, gives_sound, is_of_sound, rows_of_channels
from hf_cpu_accel.rewrite.core.context import MIN_OUT_FEATURES, WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.norm_fold import Fold
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.packed_source import saved_weight, was_packed
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import packed_item, release
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.tolerance import PACKED

PATCHES = "patches as linear"
PIXELS = "pointwise convolution as linear"
OVER_TIME = "conv1d as linear"


class LinearConvolution(DeferringConvolution, PackedLinear):
    """A convolution as a linear: [B, C, *sizes] -> [B, out_channels, *sizes'].

    Each row of its input has the values that the kernel covers in one place. The output is a view with channels last in memory,
    which the next convolution of this kind reads without a copy.

    Attributes:
        padding: zeros on either side of the input, per dimension, also if the convolution has `padding="same"`.
    """

    def __init__(
        self,
        original: Convolution,
        dtype: str,
        fold: Fold | None = None,
        *,
        int4_group: int,
        measured: bool,
    ) -> None:
        weight, bias = original.weight.detach(), original._parameters["bias"]
        rows = weight.flatten(1) if weight.dim() > 3 else weight.transpose(1, 2).flatten(1)
        saved = saved_weight(weight)
        if saved is None:
            folded, lost = (rows, None) if fold is None else (fold.weight(rows), fold.lost(rows))
            packed = pack_linear(folded, dtype, int4_group=int4_group)
        else:
            packed, lost = saved.packed, saved.lost
        used = bias if fold is None else fold.bias(bias)
        group = ProjectionGroup(packed, [(0, len(rows))], [used], measured=measured)
        linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta", dtype=weight.dtype)
        linear.register_parameter("bias", bias)
        super().__init__(group, 0, linear)
        self.fold = fold
        self.is_exact = fold is None
        self._lost = lost
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.dilation, self.groups = original.dilation, original.groups
        self.padding_mode = original.padding_mode
        padding = symmetric_padding(original)
        assert padding is not None
        self.padding = padding
        self._sums_taps = gives_sound(original) and original.stride == (1,) and packed.dtype == "float32"
        self._reads_pixels = len(self.kernel_size) > 1 and all(size == 1 for size in self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        check_inference(self, input)
        input = input.tensor if isinstance(input, LazyTensor) else input
        if input.dim() == len(self.kernel_size) + 1:
            self._check(input[None])
            return self.compute(input[None], PLAIN)[0]
        self._check(input)
        return self.run(input)

    def compute(self, input: Tensor, epilogue: Epilogue) -> Tensor:
        if self.fold is not None and not epilogue.normalized:
            return self._as_eager(input)
        if not self._reads_rows(input):
            output = self._as_eager(input)
            return output if self.fold is None else self.fold.normalize(output)
        if self._reads_pixels:
            # A map with channels first is transposed, which takes as long as the product: the next op reads channels last.
            input = input.contiguous(memory_format=torch.channels_last)
        if self._sums_taps and input.dtype is torch.float32:
            return self._from_taps(input)
        rows = self._times(input) if len(self.kernel_size) == 1 else self._patches(input)
        activation, residual = epilogue.activation, epilogue.residual
        if residual is None:
            route = self.group.fused_route(0, activation, residual=False)
            return route(rows).movedim(-1, 1)
        output = self.group.fused_route(0, "none", residual=True)(rows, residual.movedim(1, -1))
        return (output if activation == "none" else torch.relu_(output)).movedim(-1, 1)

    @property
    def used_bias(self) -> Tensor | None:
        return self.bias if self.fold is None else self.fold.bias(self.bias)

    def own_weight(self, *, normalized: bool) -> OwnWeight | None:
        pixels = self._reads_pixels and len(self.kernel_size) == 2
        return self.group.weight(0, 0) if pixels and normalized == (self.fold is not None) else None

    def supports(self, activation: str, *, residual: bool) -> bool:
        return not residual or activation in ("none", "relu")

    def output_shape(self, input: Tensor) -> tuple[int, ...] | None:
        if not self._reads_rows(input):
            return None
        sides = zip(input.shape[2:], self.kernel_size, self.stride, self.padding, strict=True)
        sizes = (out_size(pixels, size, step, margin, 1) for pixels, size, step, margin in sides)
        return input.shape[0], self.out_channels, *sizes

    def _reads_rows(self, input: Tensor) -> bool:
        """Return whether the input, with channels last, is the rows of the linear. Video with channels first is not transposed."""
        return not self._reads_pixels or len(self.kernel_size) == 2 or input.stride(1) == 1

    def _as_eager(self, input: Tensor) -> Tensor:
        """Run the convolution with the weight unpacked once."""
        weight = self.weight.to(input.dtype)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        convolve = functional.conv2d if len(self.kernel_size) == 2 else functional.conv3d
        return convolve(input, weight, bias, self.stride)

    def _times(self, input: Tensor) -> Tensor:
        """Return a view [B, L', kernel * C] of [B, C, L], whose rows overlap, over the input with channels last."""
        (size,), (step,), (margin,) = self.kernel_size, self.stride, self.padding
        return rows_of_channels(input, margin, margin).unfold(1, size, step).transpose(2, 3).flatten(2)

    def _from_taps(self, input: Tensor) -> Tensor:
        """Compute [B, C, L] -> [B, 1, L'] as a product for each step of the kernel, and their sum. A product with one output
        feature would copy overlapping rows."""
        (size,), (margin,) = self.kernel_size, self.padding
        taps = rows_of_channels(input, margin, margin) @ self.weight[0].float()
        length = taps.shape[1] - size + 1
        output = taps[:, :length, 0]
        for tap in range(1, size):
            output = output + taps[:, tap : tap + length, tap]
        output = output if self.bias is None else output + self.bias
        return output[:, None]

    def _patches(self, input: Tensor) -> Tensor:
        """Return [B, *sizes', C * kernel] of [B, C, *sizes]: one copy of the input, in the order of the weight."""
        dimensions = len(self.kernel_size)
        for dimension, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True), start=2):
            input = input.unfold(dimension, size, step)
        return input.movedim(1, dimensions + 1).flatten(dimensions + 1)

    def _check(self, input: Tensor) -> None:
        """Check the shape and dtype of an input.

        Raises:
            RuntimeError: the convolution does not support them either.
        """
        sizes = input.shape[2:]
        fits = input.dim() == len(self.kernel_size) + 2 and input.shape[1] == self.in_channels
        if not fits or any(
            size + 2 * margin < kernel
            for size, kernel, margin in zip(sizes, self.kernel_size, self.padding, strict=True)
        ):
            raise RuntimeError(
                f"input of shape {tuple(input.shape)} is not supported: expected [batch, {self.in_channels}, ...] with at least "
                f"{self.kernel_size} values per channel, including padding={self.padding} on each side"
            )
        if input.dtype not in WEIGHT_DTYPES:
            raise RuntimeError(f"input dtype {input.dtype} is not supported: use one of {WEIGHT_DTYPES}")

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    def unpack(self) -> Tensor:
        rows = super().unpack()
        if self.fold is not None:
            assert self._lost is not None
            rows = self.fold.unfolded(rows, self._lost).to(self.weight_dtype)
        if len(self.kernel_size) > 1:
            return rows.unflatten(1, (self.in_channels, *self.kernel_size))
        return rows.unflatten(1, (-1, self.in_channels)).transpose(1, 2).contiguous()

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, {super().extra_repr()}"


class ConvolutionLinearRule:
    """`nn.Conv2d` and `nn.Conv3d` on patches (ViT) or pixels, and `nn.Conv1d` where a linear is faster than oneDNN's
    convolution."""

    name = "convolution as linear"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if is_convolution(module, nn.Conv1d):
            computed = id(module) in context.weights.computed and module.kernel_size == (1,)
            gains = computed or _gains_over_time(context.dtypes.at(path)) or follows_sound(path, context)
            gains = was_packed(module.weight, self.name, gains)
            structure, fits = OVER_TIME, _is_over_time(module) and gains
        elif is_convolution(module, nn.Conv2d) or is_convolution(module, nn.Conv3d):
            structure, fits = (PIXELS if _is_pointwise(module) else PATCHES), _cuts_patches(module)
        else:
            return None
        assert isinstance(module, Convolution)
        weight = module.weight
        supported = (
            module.groups == 1
            and module.padding_mode == "zeros"
            and (
                module.out_channels >= MIN_OUT_FEATURES
                or joins_chain(module, context)
                or (gives_sound(module) and follows_sound(path, context))
            )
            and isinstance(weight, Tensor)
            and weight.dtype in WEIGHT_DTYPES
        )
        if not (
            fits and supported and context.tree.slots[id(module)] and is_plain(module)
        ) or context.skipped(path):
            return None
        return Match(module, path, structure)

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, Convolution)
        dtype, after = _weight_dtype(module, match, context), context.norms_after.get(id(module))
        fused = LinearConvolution(
            module,
            dtype,
            context.fold_after(module),
            int4_group=context.config.int4_group,
            measured=context.measured,
        )
        if context.verifies:
            sizes = [2 * kernel + 1 for kernel in module.kernel_size]
            generator = torch.Generator().manual_seed(0)
            input = torch.randn(2, module.in_channels, *sizes, generator=generator).to(module.weight.dtype)
            if len(sizes) == 2:
                input = input.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                ours = fused.compute(input, PLAIN if after is None else NORMALIZED)
                theirs = module(input) if after is None else after.norm(module(input))
            reason = compare(ours, theirs, dim=1).reason(PACKED.of(dtype, module.weight.dtype))
            if reason is not None:
                return Outcome((PlanItem.left(match.path, match.data, reason),), (module,))
        fused.waits = waits(module, context)
        context.swap(module, fused)
        release(module, fused, context)
        item = packed_item(match.path, match.data, "linear", fused)
        if after is None:
            return Outcome((item,), (module,))
        swap_norm(after, context)
        return Outcome((item, norm_item(after, "linear", fused.packed_dtype, "ours")), (module, after.norm))


def _cuts_patches(module: nn.Module) -> bool:
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    cuts = _is_pointwise(module) or (module.kernel_size == module.stride and _is_dense(module))
    return cuts and symmetric_padding(module) == (0,) * len(module.kernel_size)


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether the kernel covers one pixel. oneDNN takes fifty times as long for some if the image is smaller than its
    layout expects."""
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    return all(size == 1 for size in module.kernel_size)


def _is_over_time(module: nn.Conv1d) -> bool:
    # With few channels the product is small, and neighboring ops use channels first. But raw audio has one channel, and
    # oneDNN takes ten times as long to read it. The convolution that returns audio reads the layout of the ones before it.
    enough = module.in_channels >= MIN_OUT_FEATURES or is_of_sound(module)
    return enough and symmetric_padding(module) is not None and _is_dense(module)


def _gains_over_time(dtype: str) -> bool:
    """Return whether a linear is faster for 1-d convolutions. In float32 oneDNN is as fast, and elsewhere its input would be
    transposed for nothing."""
    return dtype == "int8" or (dtype == "bfloat16" and hardware.native_bf16_is_fast())


def _is_dense(module: Convolution) -> bool:
    return all(step == 1 for step in module.dilation)


def _weight_dtype(module: Convolution, match: Match, context: Context) -> str:
    """Return the dtype of the weight, as for a linear. Patches of the image itself, which are cut once, are not rounded to
    integers."""
    if match.data == OVER_TIME and module.in_channels >= MIN_OUT_FEATURES and not gives_sound(module):
        return context.dtypes.at(match.path)
    alike = nn.Linear(module.weight[0].numel(), MIN_OUT_FEATURES, device="meta")
    dtype = context.dtypes.of_weight(match.path, [alike])
    of_image = (module.in_channels <= 4 or gives_sound(module)) and context.dtypes.own(match.path) is None
    return "float32" if dtype in QUANTIZED and of_image else dtype
