"""Norms of a decoder layer, as paths.

Norms of heads may have separate weights per head: one module with a matrix (Cohere), or a norm per head (StableLM).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import row_error
from hf_cpu_accel.ops.decoder.layers import Norm
from hf_cpu_accel.rewrite.core.verify import run_alone
from hf_cpu_accel.rewrite.norm.match import NormSpec, identify_norm, small_floats
from hf_cpu_accel.tolerance import FORMULA


@dataclass(frozen=True)
class NormPart:
    """The norm at `path` in the layer."""

    path: str
    spec: NormSpec

    def norm(self, layer: nn.Module) -> Norm:
        module = layer.get_submodule(self.path)
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        assert self.spec.kind in ("rms_norm", "layer_norm")
        return Norm(self.spec.kind, self.spec.scale(weight), bias, self.spec.eps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class HeadNormParts:
    """The norm of head h is at `paths[h]` in the layer; a single path has weights [heads, head_dim]."""

    paths: tuple[str, ...]
    spec: NormSpec

    def norm(self, layer: nn.Module) -> Norm:
        assert self.spec.kind in ("rms_norm", "layer_norm")
        weight, bias = (self.stacked(layer, name) for name in ("weight", "bias"))
        return Norm(self.spec.kind, self.spec.scale(weight), bias, self.spec.eps)  # type: ignore[arg-type]

    def stacked(self, layer: nn.Module, name: str) -> Tensor | None:
        """Return the parameter as [heads, head_dim], or None if the norms do not have it."""
        parameters = [layer.get_submodule(path)._parameters.get(name) for path in self.paths]
        present = [parameter.detach() for parameter in parameters if parameter is not None]
        if len(present) < len(self.paths):
            return None
        return present[0] if present[0].dim() == 2 else torch.stack(present)

    def modules(self, layer: nn.Module) -> list[nn.Module]:
        return [layer.get_submodule(path) for path in self.paths]


def find_head_norms(layer: nn.Module) -> Iterator[HeadNormParts]:
    """Yield the norms for several heads among the modules of `layer`."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.ModuleList):
            specs = [identify_norm(child) for child in module]
            if len(specs) > 1 and specs[0] is not None and all(spec == specs[0] for spec in specs):
                yield HeadNormParts(tuple(f"{path}.{number}" for number in range(len(specs))), specs[0])
        else:
            spec = _identify(module)
            if spec is not None:
                yield HeadNormParts((path,), spec)


def normalize_heads(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalize the last dimension of float32 `x`, with weight and bias that broadcast."""
    shape, scale = x.shape[-1:], spec.scale(weight)
    if spec.kind == "rms_norm":
        x = functional.rms_norm(x, shape, None, spec.eps)
    else:
        x = functional.layer_norm(x, shape, None, None, spec.eps)
    x = x if scale is None else x * scale.float()
    return x if bias is None else x + bias.float()


def _identify(module: nn.Module) -> NormSpec | None:
    """Return the head norm that a module with a weight [heads, head_dim], and optionally a bias, computes, or None."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.dim() != 2 or module._modules or module._buffers:
        return None
    if set(parameters) - {"weight", "bias"} or (bias is not None and bias.shape != weight.shape):
        return None
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2, 3, *weight.shape, generator=generator) + 0.5
    tolerance = FORMULA.of(weight.dtype)
    for eps, kind, offset in itertools.product(small_floats(module), ("rms_norm", "layer_norm"), (0.0, 1.0)):
        spec = NormSpec(kind, eps, offset)
        errors = [
            row_error(run_alone(module, x.to(weight.dtype)), normalize_heads(spec, x, weight, bias))
            for x in (input, input * 1e-3)  # eps shows where the input is tiny
        ]
        if max(errors) <= tolerance:
            return spec
    return None
