"""Float32 copies of decoder layers with random norms and biases, which are traced instead of the layers.

A copy has the same packed weights and random norms and biases, so that a scale of 1 or a bias of 0 in this checkpoint still
shows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.rewrite.attention.match import dispatches
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import required
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import FusedNorm


def randomized_copy_of(layer: nn.Module) -> nn.Module:
    """Return a copy of `layer` in float32 with the same packed weights, and other norms and biases.

    Raises:
        Refused: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in layer.modules():
        packed: tuple[PackedWeight, ...] = ()
        if isinstance(module, PackedLinear):
            packed = (module.group.packed,)
        elif isinstance(module, PackedExperts):
            packed = tuple(module.packed.values())
        for weight in packed:
            memo |= {id(part): part for part in (weight.data, weight.scale) if part is not None}
        memo |= {id(kept): kept for kept in _originals(module)}
    memo |= {id(config): copy.copy(config) for config in attention_configs(layer)}
    shared = set(memo)
    copied: nn.Module = required(call_foreign(copy.deepcopy, layer, memo))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in copied.parameters():
            if id(parameter) not in shared:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.data = parameter.data.float() + noise
        for path in scales_of(copied):
            buffer = copied.get_buffer(path)
            buffer.data = buffer.data.float() + torch.rand(buffer.shape, generator=generator) + 0.3
    for module in copied.modules():
        if isinstance(module, PackedLinear):
            module.weight_dtype = torch.float32
            module.group.take_bias(module.index, module.used_bias)
        elif isinstance(module, PackedExperts):
            module.weight_dtype = torch.float32
            module.forget()
        elif isinstance(module, FusedNorm):
            module.refresh()
    return copied


def scales_of(layer: nn.Module) -> list[str]:
    """Return the names of the layer's scalar buffers, which may multiply its output (Gemma 4)."""
    return [
        name
        for name, b in layer._buffers.items()
        if b is not None and b.numel() == 1 and b.is_floating_point()
    ]


def _originals(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are kept next to the packed ones."""
    if isinstance(module, PackedLinear):
        names: tuple[str, ...] = ("weight",)
    elif isinstance(module, PackedExperts):
        names = tuple(stack.name for stack in module.form.stacks())
    else:
        return []
    kept = (module._parameters.get(name) for name in names)
    return [parameter for parameter in kept if parameter is not None]


def attention_configs(layer: nn.Module) -> list[Any]:
    """Return the configs that choose the attention implementation, each once; a randomized copy has its own."""
    configs = [vars(module).get("config") for module in layer.modules() if dispatches(module)]
    return list({id(config): config for config in configs if config is not None}.values())
