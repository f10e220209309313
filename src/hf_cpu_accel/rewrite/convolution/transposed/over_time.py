"""Transposed 1-d convolutions as linears: each row of the product has the output values of one step of the input.

A step of the input adds to `kernel_size` values of the output, `stride` apart from step to step. So `stride` values are computed
from as many steps of the input as a kernel has strides: a linear over rows that overlap, with stride * out_channels features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.rewrite.convolution.layer import put_alone
from hf_cpu_accel.rewrite.convolution.sound import DeferredELU, has_channels_last, rows_of_channels
from hf_cpu_accel.rewrite.convolution.transposed.windows import as_kernel, as_windows, margins_of, windows_of
from hf_cpu_accel.rewrite.core.context import MIN_OUT_FEATURES, WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.packed_source import saved_weight
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import packed_item
from hf_cpu_accel.rewrite.linear.projection_group import ProjectionGroup

STRUCTURE = "transposed conv1d as linear"


class TransposedConvolution(PackedLinear):
    """`nn.ConvTranspose1d` as a linear: [B, C, L] or [C, L] -> [B, out_channels, L'] or [out_channels, L'], with channels last
    in memory if the input has them last.

    Attributes:
        taps: steps of the input that a value of the output is computed from.
    """

    def __init__(self, original: nn.ConvTranspose1d, dtype: str, *, int4_group: int, measured: bool) -> None:
        (step,) = original.stride
        weight, bias = original.weight.detach(), original._parameters["bias"]
        (taps,) = windows_of(original.kernel_size, original.stride)
        saved = saved_weight(weight)
        features = (step * original.out_channels, taps * original.in_channels)
        packed = (
            pack_linear(_as_rows(weight, original.stride), dtype, int4_group=int4_group)
            if saved is None
            else saved.packed
        )
        linear = nn.Linear(features[1], features[0], bias=False, device="meta", dtype=weight.dtype)
        linear.register_parameter("bias", bias)
        used = None if bias is None else bias.detach().repeat(step)
        super().__init__(ProjectionGroup(packed, [(0, features[0])], [used], measured=measured), 0, linear)
        self.taps = taps
        self.in_channels, self.out_channels = original.in_channels, original.out_channels
        self.kernel_size, self.stride = original.kernel_size, original.stride
        self.padding = margins_of(original)
        self.output_padding, self.dilation = original.output_padding, original.dilation
        self.groups, self.padding_mode = original.groups, original.padding_mode

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        check_inference(self, input)
        if isinstance(input, LazyTensor) and not isinstance(input, DeferredELU):
            input = input.tensor
        if output_size is not None:
            return self._as_eager(input, output_size)
        if input.dim() == 2:
            return self._compute(input[None])[0]
        return self._compute(input)

    def _compute(self, input: Tensor) -> Tensor:
        """Compute the convolution of a batch.

        Raises:
            RuntimeError: the convolution does not support the input either.
        """
        (size,), (step,), (margin,) = self.kernel_size, self.stride, self.padding
        length = (input.shape[-1] - 1) * step + size - 2 * margin
        if input.dim() != 3 or input.shape[1] != self.in_channels or input.shape[-1] < 1 or length < 1:
            raise RuntimeError(
                f"input of shape {tuple(input.shape)} is not supported: expected [batch, {self.in_channels}, length], long enough "
                f"for an output of one step after padding={self.padding} is removed from each side"
            )
        if input.dtype not in WEIGHT_DTYPES:
            raise RuntimeError(f"input dtype {input.dtype} is not supported: use one of {WEIGHT_DTYPES}")
        rows = rows_of_channels(input, self.taps - 1, self.taps - 1)
        rows = rows.unfold(1, self.taps, 1).transpose(2, 3).flatten(2)
        output: Tensor = self.group.fused_route(0, "none", residual=False)(rows)
        steps = output.unflatten(2, (step, self.out_channels)).flatten(1, 2)
        output = steps.narrow(1, margin, length).transpose(1, 2)
        # Channels are first or last as in the input, since it is mostly added to tensors in its own layout.
        return output if has_channels_last(input) else output.contiguous()

    def _as_eager(self, input: Tensor, output_size: Sequence[int]) -> Tensor:
        """Run the convolution with the weight unpacked once, for an output of another length."""
        size = list(output_size)[-1]
        usual = (input.shape[-1] - 1) * self.stride[0] + self.kernel_size[0] - 2 * self.padding[0]
        if not 0 <= size - usual < self.stride[0]:
            raise ValueError(
                f"output_size={size}: this convolution can return {usual} to {usual + self.stride[0] - 1}"
            )
        bias = None if self.bias is None else self.bias.to(input.dtype)
        weight = self.weight.to(input.dtype)
        return functional.conv_transpose1d(input, weight, bias, self.stride, self.padding, size - usual)

    @property
    def used_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.repeat(self.stride[0])

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels, *self.kernel_size)

    def unpack(self) -> Tensor:
        windows = super().unpack().unflatten(1, (self.taps, self.in_channels)).transpose(1, 2)
        return as_kernel(windows, self.kernel_size, self.stride)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, {super().extra_repr()}"


def _as_rows(weight: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a weight [C, out_channels, kernel] as [stride * out_channels, taps * C], the earliest step of the input first."""
    return as_windows(weight, stride).transpose(1, 2).flatten(1)


class TransposedConvolutionRule:
    """`nn.ConvTranspose1d` of enough channels, without groups, dilation or output padding."""

    name = "transposed convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if (
            not isinstance(module, nn.ConvTranspose1d)
            or type(module).forward is not nn.ConvTranspose1d.forward
        ):
            return None
        usual = module.groups == 1 and module.dilation == (1,) and module.output_padding == (0,)
        enough = min(module.in_channels, module.out_channels * module.stride[0]) >= MIN_OUT_FEATURES
        weight = module.weight
        supported = isinstance(weight, Tensor) and weight.dtype in WEIGHT_DTYPES
        if not (usual and enough and supported and context.tree.slots[id(module)] and is_plain(module)):
            return None
        return None if context.skipped(path) else Match(module, path, STRUCTURE)

    def apply(self, match: Match, context: Context) -> Outcome:
        module = match.module
        assert isinstance(module, nn.ConvTranspose1d)
        (taps,) = windows_of(module.kernel_size, module.stride)
        features = (taps * module.in_channels, module.stride[0] * module.out_channels)
        alike = nn.Linear(*features, device="meta", dtype=module.weight.dtype)
        dtype = context.dtypes.of_weight(match.path, [alike])
        packed = TransposedConvolution(
            module, dtype, int4_group=context.config.int4_group, measured=context.measured
        )
        item = packed_item(match.path, STRUCTURE, "linear", packed)
        return put_alone(match, packed, item, [2 * (taps + packed.padding[0]) + 1], context)
