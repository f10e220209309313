"""Explain why a module with its own weights is not replaced, where no rule gives a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import MIN_OUT_FEATURES, Context
from hf_cpu_accel.rewrite.core.refusal import RECORDED

_ACTIVATIONS = "torch.nn.modules.activation"


def has_weights(module: nn.Module) -> bool:
    """Return whether the module itself has parameters, besides those of its children."""
    return any(True for _ in module.parameters(recurse=False))


def items_left(
    modules: Sequence[tuple[str, nn.Module]], items: Sequence[PlanItem], context: Context
) -> Iterator[PlanItem]:
    """Yield rows for those among `modules` of the original tree that have weights, are still in use and have no row in `items`."""
    told = {item.name for item in items}
    # Modules in a recorded layer are used as in its own forward.
    whole = (item for item in items if item.reason is None and item.structure != RECORDED)
    replaced = {item.name for item in whole}
    used = {id(module) for module in context.root.modules()}
    for path, module in modules:
        if path in told or not has_weights(module) or _is_below(path, replaced):
            continue
        if id(module) in used:
            yield PlanItem.left(path, type(module).__name__, obstacle(path, module, context))


def _is_below(path: str, others: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:length]) in others for length in range(1, len(parts)))


def obstacle(path: str, module: nn.Module, context: Context) -> str:
    """Return the reason for the column "left because" of the plan."""
    if context.skipped(path):
        return "skip_modules"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript, which ignores replaced modules"
    if parametrize.is_parametrized(module) or "parametrizations" in path.split("."):
        return "a parametrization recomputes its weight in each call: it cannot be packed"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "a table lookup: nothing to pack or fuse"
    if {"num_embeddings", "embedding_dim"} <= set(vars(module)):
        return "a custom table lookup: nothing to pack or fuse"
    if isinstance(module, nn.LayerNorm):
        return "already a single op, with nothing next to it to fuse"
    if isinstance(module, _ConvNd):
        return _of_convolution(module, context.dtypes.at(path))
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "a recurrent network: PyTorch's op runs its steps in sequence"
    if isinstance(module, nn.MultiheadAttention):
        return "PyTorch's attention reads these weights directly, not through a linear"
    return _of_norm(module) or _of_parameters(module)


def _of_convolution(module: Any, dtype: str) -> str:
    kind = f"a convolution over {len(module.kernel_size)} dimension{'s'[: len(module.kernel_size) > 1]}"
    if isinstance(module, _ConvTransposeNd):
        return _of_transposed(module)
    if module.groups > 1:
        return f"{kind} with groups={module.groups} is not supported"
    if len(module.kernel_size) > 1 and any(step > 1 for step in module.dilation):
        return f"{kind} with dilation={tuple(module.dilation)} is not supported"
    if min(module.in_channels, module.out_channels) < MIN_OUT_FEATURES:
        return (
            f"{kind} of {module.in_channels} to {module.out_channels} channels: too few to gain from packing"
        )
    if module.padding_mode != "zeros":
        return f"{kind} with padding_mode={module.padding_mode!r} is not supported, only 'zeros'"
    if len(module.kernel_size) == 1:
        return f"{kind}: PyTorch's kernel is as fast in {dtype}"
    return f"{kind} with kernel_size={tuple(module.kernel_size)} is not supported"


def _of_transposed(module: Any) -> str:
    kind = "a transposed convolution"
    if len(module.kernel_size) > 1:
        return f"{kind} over {len(module.kernel_size)} dimensions is not supported"
    if module.groups > 1:
        return f"{kind} with groups={module.groups} is not supported"
    if any(step > 1 for step in module.dilation):
        return f"{kind} with dilation={tuple(module.dilation)} is not supported"
    if any(module.output_padding):
        return f"{kind} with output_padding={tuple(module.output_padding)} is not supported"
    return f"{kind} of {module.in_channels} to {module.out_channels} channels: too few to gain from packing"


def _of_norm(module: nn.Module) -> str | None:
    if isinstance(module, nn.GroupNorm | _InstanceNorm):
        return "this norm over channels is not supported in this form or position"
    if {"running_mean", "running_var"} <= set(module._buffers):
        return "a batch norm that does not directly follow a convolution: it cannot be folded"
    if type(module).__module__ == _ACTIVATIONS:
        return "an activation with parameters cannot be fused into a product"
    return None


def _of_parameters(module: nn.Module) -> str:
    """Return a reason from the shapes of the parameters, since the forward of the module is unknown."""
    parameters = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    names = ", ".join(f"{name} {list(shape)}" for name, shape in list(parameters.items())[:3])
    names += f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    most = max(sum(side > 1 for side in shape) for shape in parameters.values())
    if most <= 1:
        return f"its forward uses only vectors ({names}), but is not a supported norm"
    if module._modules:
        return f"its forward uses {names} directly, and is neither a linear nor a table lookup"
    if most == 2:
        return f"its forward uses {names}, but is neither a linear nor a table lookup"
    return f"its forward uses {names} as a stack of matrices, but not as experts"
