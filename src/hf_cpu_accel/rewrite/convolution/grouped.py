"""Grouped 1-d convolutions, the position embeddings of wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477): a linear for each
group, whose rows are overlapping views of the input.

Their weights mostly are computed (weight norm), so the module keeps its parameters, and only its forward changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import QUANTIZED, PackedWeight, pack_linear
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, conflicting_names, fused_layer
from hf_cpu_accel.patching.hooks import forward_hooks
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.geometry import is_convolution
from hf_cpu_accel.rewrite.core.context import MAX_INTEGER_FEATURES, WEIGHT_DTYPES, Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "grouped conv1d"
# With fewer channels per group, or a shorter kernel, the linear is too small.
MIN_CHANNELS, MIN_FEATURES = 16, 128


class GroupedConvolution(FusedModuleMixin):
    """Mixed into the convolution's own class: [B, C, L] or [C, L] -> [B, out_channels, L'] or [out_channels, L'], a view with
    channels last in memory."""

    packs_parameters = True
    _packed: list[PackedWeight]

    def forward(self, input: Tensor) -> Tensor:
        fits = input.dim() in (2, 3) and input.shape[-2] == self.in_channels and input.dtype in WEIGHT_DTYPES
        margin, kernel = self.padding[0], self.kernel_size[0]
        short = input.shape[-1] + 2 * margin < kernel
        if not fits or short or not input.numel() or self.is_watched or is_tracing():
            output: Tensor = self._original_class.forward(self, input)
            return output
        check_inference(self, input)
        input = ordinary(input)
        padded = functional.pad(input, (margin, margin)) if margin else input
        groups = (
            padded.unflatten(-2, (self.groups, -1)).transpose(-1, -2).contiguous()
        )  # [.., groups, L, channels]
        sounds = groups if input.dim() == 3 else groups[None]
        output = torch.stack([self._one(sound, input.dtype) for sound in sounds]).transpose(1, 2)
        return output if input.dim() == 3 else output[0]

    def _one(self, groups: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute [groups, L, channels] -> [L', out_channels]."""
        biases = [None] * self.groups if self.bias is None else self.bias.chunk(self.groups)
        outputs = []
        for group, packed, bias in zip(groups, self._packed, biases, strict=True):
            rows = group.unfold(0, self.kernel_size[0], self.stride[0]).transpose(1, 2).flatten(1)
            outputs.append(linear(rows, packed, bias))
        return torch.cat(outputs, dim=-1).to(dtype)

    # Attributes of the class that this is mixed into.
    in_channels: int
    groups: int
    kernel_size: tuple[int]
    stride: tuple[int]
    padding: tuple[int]
    bias: Tensor | None


class GroupedConvolutionRule:
    """Grouped `nn.Conv1d` of many channels with a long kernel."""

    name = "grouped convolution"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not is_convolution(module, nn.Conv1d):
            return None
        channels, (kernel,) = module.in_channels // module.groups, module.kernel_size
        large = module.groups > 1 and channels >= MIN_CHANNELS and channels * kernel >= MIN_FEATURES
        regular = not isinstance(module.padding, str) and module.padding_mode == "zeros"
        if not (large and regular and module.dilation == (1,) and module.weight.dtype in WEIGHT_DTYPES):
            return None
        _, original = context.weights.computed.get(id(module), (module, module))
        if any(forward_hooks(original)):  # the own forward, which runs where the fused one cannot, needs them
            return None
        if refusal_to_swap(module, path, context) or conflicting_names(
            GroupedConvolution, module, ("_packed",)
        ):
            return None
        dtype = context.dtypes.at(path)
        if dtype in QUANTIZED and channels * kernel > MAX_INTEGER_FEATURES:
            return None
        return Match(module, path, "int8" if dtype == "int4" else dtype)

    def apply(self, match: Match, context: Context) -> Outcome:
        module, dtype = match.module, match.data
        assert isinstance(module, nn.Conv1d)
        rows = module.weight.detach().transpose(1, 2).flatten(1).chunk(module.groups)
        packed = [pack_linear(group, dtype) for group in rows]
        _, original = context.weights.computed.get(id(module), (module, module))
        fused: Any = fused_layer(GroupedConvolution, original, _packed=packed)
        if context.config.verify:
            generator = torch.Generator().manual_seed(0)
            length = module.kernel_size[0] + 3
            input = torch.randn(2, module.in_channels, length, generator=generator).to(module.weight.dtype)
            with torch.no_grad():
                ours, theirs = (layer(input) for layer in (fused, module))
            reason = compare(ours, theirs, dim=1).reason(PACKED.of(dtype, module.weight.dtype))
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (module,))
        context.swap(module, fused)
        nbytes = sum(weight.nbytes for weight in packed)
        item = PlanItem(match.path, STRUCTURE, "linear", dtype, nbytes, None, provider="ours")
        return Outcome((item,), (module,))
