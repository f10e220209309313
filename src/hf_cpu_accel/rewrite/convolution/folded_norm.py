"""Batch norms with fixed statistics: their factors and offsets, and the module that replaces a folded norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_cpu_accel.check import compare
from hf_cpu_accel.guard.plain_values import is_plain_value
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, conflicting_names, fused_layer
from hf_cpu_accel.patching.replacement import refuse_other
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.convolution.deferred import DeferredConvolution
from hf_cpu_accel.rewrite.core.activations import identify
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.norm_fold import Fold, NormAfter
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import AFFINE

STRUCTURE = "batch norm"
_JOINING = ("relu", "silu", "gelu", "gelu_tanh", "relu6", "hardswish", "leaky_relu", "leaky_relu_tenth")


class FoldedNorm(FusedModuleMixin):
    """Replaces a norm whose gain and shift its convolution applies.

    It normalizes any other input as the original does, whose parameters and buffers it has.

    Attributes:
        fold: the fold of the convolution.
    """

    packs_parameters = True
    fold: Fold

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as `nn.Module` does, but reject changes of the numbers that the norm is computed with.

        Raises:
            RuntimeError: one would change.
        """
        if name != "training" and not name.startswith("_") and is_plain_value(vars(self).get(name)):
            refuse_other(vars(self), name, value)
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DeferredConvolution):
            joined = input.normalized(self.fold)
            if joined is not None:
                return joined
        if is_tracing():
            return input  # the convolution has applied it; the link was verified when the two were joined
        input = input.tensor if isinstance(input, LazyTensor) else input
        output: Tensor = self._original_class.forward(self, input)
        return output


def fold_of(norm: nn.Module, channels: int) -> Fold | None:
    """Return the fold of `norm` if it multiplies each of `channels` channels by a number and adds one, for any image; else None.

    The function tests values: norms with fixed statistics pass, norms that use the statistics of the batch do not.
    """
    if norm.training or list(norm.children()) or conflicting_names(FoldedNorm, norm, ("fold",)):
        return None
    tensors = [*norm.parameters(), *norm.buffers()]
    if not tensors or any(tensor.shape not in ((channels,), ()) for tensor in tensors):
        return None
    exact = {name: tensor.detach() for name, tensor in (*norm.named_parameters(), *norm.named_buffers())}
    exact = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in exact.items()
    }
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, channels, 3, 2, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(1, channels, 1, 1, dtype=torch.float64)
    shadow = Shadow(norm)  # it has other parameters during the call
    with torch.no_grad(), shadow.running():
        call = partial(call_foreign, functional_call, shadow.module, exact)
        outputs = [call(input) for input in (zeros, zeros + 1, image)]
    given = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.dtype is torch.float64]
    if len(given) != len(outputs):
        return None
    shift, moved, output = given
    if not shift.shape == moved.shape == zeros.shape:
        return None
    gain = moved - shift
    affine = image * gain + shift
    if not compare(output, affine).within(AFFINE):
        return None
    return Fold(gain.flatten().float(), shift.flatten().float())


def swap_norm(after: NormAfter, context: Context) -> None:
    """Replace the norm by a `FoldedNorm`."""
    folded = fused_layer(FoldedNorm, after.norm, fold=after.fold)
    context.swap(after.norm, folded)


def norm_item(after: NormAfter, op: str, dtype: str, provider: str) -> PlanItem:
    """Return the row of a folded norm."""
    return PlanItem(
        after.path, f"{STRUCTURE}, folded", op, dtype, packed_bytes=0, reason=None, provider=provider
    )


def waits(convolution: nn.Module, context: Context) -> bool:
    """Return whether an op may join this convolution: its norm, or an activation next to it.

    A module that the model itself calls returns outputs of the model, which must not wait.
    """
    if id(convolution) in context.norms_after:
        return True
    parents = [parent for parent, _ in context.tree.slots[id(convolution)] if parent is not context.root]
    siblings = (child for parent in parents for child in parent.children() if not list(child.children()))
    return any(identify(child) in _JOINING for child in siblings)
