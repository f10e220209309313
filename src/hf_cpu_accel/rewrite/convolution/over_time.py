"""Padding and ELUs around 1-d convolutions that run as linears, with channels last in memory.

Audio codecs (SEANet: Tagliasacchi et al. 2020, arXiv:2009.02095) pad the audio on one side, by zeros or reflection, in the
forward of a module around the convolution. torch's padding returns channels first for any input, so the input of a convolution
with channels last would be transposed, and its output transposed back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.derivatives import in_forward_mode, refuse_transforms
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.as_linear import LinearConvolution
from hf_cpu_accel.rewrite.convolution.sound import DeferredELU, has_channels_last, rows_of_channels
from hf_cpu_accel.rewrite.convolution.transposed.over_time import TransposedConvolution
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.runtime.torch_modes import AroundFunctions
from hf_cpu_accel.runtime.tracing import is_tracing

STRUCTURE, WAITING = "conv1d padding", "conv1d ELU"


class PaddedOverTime(FusedModuleMixin):
    """Mixed into the class of a module around a 1-d convolution: its own forward, with padding that keeps channels last."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._original_class.forward
        if is_tracing():
            return own(self, *args, **kwargs)
        with AroundFunctions(_padded):
            return own(self, *args, **kwargs)


class ELUOverTime(FusedModuleMixin):
    """Mixed into `nn.ELU`: its output for audio with channels last waits for a convolution that needs padding."""

    alpha: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        waits = input.dim() == 3 and not self.inplace and not input.requires_grad and not is_tracing()
        if not waits or in_forward_mode() or not has_channels_last(input):
            output: Tensor = self._original_class.forward(self, input)
            return output
        refuse_transforms("an accelerated ELU", input)
        return DeferredELU.of(input.tensor if isinstance(input, LazyTensor) else input, self.alpha)


def keep_channels_last(context: Context) -> list[PlanItem]:
    """Keep channels last in the padding around 1-d convolutions, and make ELUs next to them wait. Call it after convolutions are
    packed."""
    items = fuse_each(context, STRUCTURE, _match_padding, lambda fused, path: ("pad", "input dtype"))
    waits = fuse_each(context, WAITING, _match_elu, lambda fused, path: ("elu", "input dtype"))
    return [*items, *waits]


def _match_elu(module: nn.Module, path: str, context: Context) -> ELUOverTime | None:
    if (
        type(module) is not nn.ELU
        or not is_plain(module)
        or refusal_to_fuse(module, path, context) is not None
    ):
        return None
    above = context.root.get_submodule(path.rpartition(".")[0])
    if not isinstance(above, nn.ModuleList | nn.Sequential) or not any(map(_is_over_time, above)):
        return None
    fused: ELUOverTime = fused_layer(ELUOverTime, module)
    return fused


def _is_over_time(module: nn.Module) -> bool:
    return isinstance(module, PaddedOverTime) or any(
        isinstance(child, TransposedConvolution) for child in (module, *module.children())
    )


def _match_padding(module: nn.Module, path: str, context: Context) -> PaddedOverTime | Refusal | None:
    if isinstance(module, FusedModuleMixin | nn.ModuleList | nn.Sequential) or module is context.root:
        return None
    inside = list(module.children())
    if len(inside) != 1 or not isinstance(inside[0], LinearConvolution) or len(inside[0].kernel_size) > 1:
        return None
    reason = refusal_to_fuse(module, path, context)
    if reason is not None:
        return Refusal(reason)
    fused: PaddedOverTime = fused_layer(PaddedOverTime, module)
    return fused


def _padded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is functional.pad:
        output = _pad(*args, **kwargs)
        if output is not None:
            return output
    return func(*args, **kwargs)


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor | None:
    """Return the output of `functional.pad` for audio [B, C, L] with channels last in memory, in the same layout; None for other
    inputs."""
    mirrors = mode == "reflect"
    if not (mirrors or mode == "constant") or input.dim() != 3 or len(pad) != 2 or input.is_contiguous():
        return None
    if not has_channels_last(input):
        return None
    before, after = map(int, pad)
    length = input.shape[2]
    if min(before, after) < 0 or (mirrors and max(before, after) >= length):
        return None
    rows = rows_of_channels(input, before, after, 0.0 if value is None else value)
    if mirrors:
        inside = rows[:, before : before + length]
        rows[:, :before] = inside[:, 1 : before + 1].flip(1)
        rows[:, before + length :] = inside[:, length - 1 - after : length - 1].flip(1)
    return rows.transpose(1, 2)
