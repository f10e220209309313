"""What convolutions over time as linears are asked for by their hosts: zeros beside their input, with its channels last in memory.

Codecs of sound (SEANet: Tagliasacchi et al. 2020, arXiv:2009.02095) put zeros on one side in the forward of a module around the
convolution. Torch's padding has the channels first whatever it is given, so a convolution that reads channels last would have its
input turned, and its output turned back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.as_linear import LinearConvolution
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.runtime.torch_modes import AroundFunctions
from hf_cpu_accel.runtime.tracing import is_compiling

STRUCTURE = "zeros over time"


class PaddedOverTime(FusedModuleMixin):
    """Mixed into the class of a module around a convolution over time: its own forward, where padding keeps the channels last."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._original_class.forward
        if is_compiling():
            return own(self, *args, **kwargs)
        with AroundFunctions(_padded):
            return own(self, *args, **kwargs)


def keep_channels_last(context: Context) -> list[PlanItem]:
    """Have modules around convolutions over time pad so. To be called when these are packed."""
    return fuse_each(context, STRUCTURE, _looked_at, lambda fused, path: ("pad", "as its input"))


def _looked_at(module: nn.Module, path: str, context: Context) -> PaddedOverTime | Refusal | None:
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
    """What `functional.pad` gives for sound [B, C, L] whose channels are last in memory, as they are then, too; None for others."""
    if mode != "constant" or input.dim() != 3 or len(pad) != 2 or input.is_contiguous():
        return None
    rows = input.transpose(1, 2)
    if not rows.is_contiguous():
        return None
    before, after = map(int, pad)
    if before < 0 or after < 0:
        return None
    batch, length, channels = rows.shape
    output = rows.new_empty(batch, before + length + after, channels)
    filling = 0.0 if value is None else value
    output[:, :before] = filling
    output[:, before : before + length] = rows
    output[:, before + length :] = filling
    return output.transpose(1, 2)
