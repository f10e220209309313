"""Norms written in Python, recognized by their outputs: RMSNorm and LayerNorm on the fused ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.norm import layer_norm, rms_norm
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.patching.replacement import Replacement
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.activations import is_library_function
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.core.verify import probe, run_alone
from hf_cpu_accel.tolerance import FORMULA, PACKED


@dataclass(frozen=True)
class NormSpec:
    """A norm: `kind` is `"layer_norm"` or `"rms_norm"`, `eps` is added to the variance, and `offset` to the weight (Gemma: 1)."""

    kind: str
    eps: float
    offset: float = 0.0

    def scale(self, weight: Tensor | None) -> Tensor | None:
        """Return the factor of the normalized values, or None."""
        return weight if weight is None or self.offset == 0 else weight.detach().float() + self.offset

    def normalize(self, input: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run the fused op on `input` [..., N]."""
        if self.kind == "rms_norm":
            return rms_norm(input, scale, self.eps)
        return layer_norm(input, scale, bias, self.eps)

    def compute(self, module: nn.Module, input: Tensor) -> Tensor:
        """Run the fused op with the parameters of `module`."""
        return self.normalize(
            input, self.scale(module._parameters.get("weight")), module._parameters.get("bias")
        )

    def reference(self, module: nn.Module, input: Tensor) -> Tensor:
        """Compute the norm with the parameters of `module` in plain torch."""
        parameters = {name: value.detach().float() for name, value in module.named_parameters(recurse=False)}
        shape, scale, values = input.shape[-1:], self.scale(parameters.get("weight")), input.float()
        if self.kind == "rms_norm":
            return functional.rms_norm(values, shape, scale, self.eps).to(input.dtype)
        return functional.layer_norm(values, shape, scale, parameters.get("bias"), self.eps).to(input.dtype)


_USUAL_EPS = (1e-5, 1e-6)  # for modules with a literal in their code

# By the names of the parameters.
_KINDS = {("weight",): ("rms_norm", "layer_norm"), ("bias", "weight"): ("layer_norm",)}


def identify_norm(module: nn.Module) -> NormSpec | None:
    """Return the norm over the last dimension that `module` computes, or None.

    `nn.LayerNorm` is recognized by its class. A Python module is recognized if it has only a weight (and a bias), a small float
    attribute that can be eps, and returns the values of the plain formula on ordinary and on tiny inputs, where eps shows. A
    weight that is stored as its difference from 1 is tried, too.
    """
    if isinstance(module, FusedNorm):
        return module.spec
    if type(module) is nn.LayerNorm:
        return NormSpec("layer_norm", module.eps) if len(module.normalized_shape) == 1 else None
    parameters = dict(module.named_parameters(recurse=False))
    kinds = _KINDS.get(tuple(sorted(parameters)), ())
    weight = parameters.get("weight")
    if not kinds or weight is None or weight.dim() != 1 or module._modules or module._buffers:
        return None
    for eps, kind, offset in itertools.product(small_floats(module), kinds, (0.0, 1.0)):
        spec = NormSpec(kind, eps, offset)
        if all(_agrees(spec, module, scale, weight) for scale in (1.0, 1e-3)):
            return spec
    return None


def identify_bare_norm(module: nn.Module, features: int) -> NormSpec | None:
    """Return the norm of a module of torch or transformers without parameters, for inputs of `features` features (OLMo,
    nanochat), or None."""
    state = module._parameters or module._modules or module._buffers
    if state or not is_library_function(type(module)) or len(parameters_of(module.forward)) != 1:
        return None
    inputs = [(probe(features, torch.float32) + 0.5) * scale for scale in (1.0, 1e-3)]
    outputs = [run_alone(module, input) for input in inputs]
    for eps, kind in itertools.product((*small_floats(module), *_USUAL_EPS), ("rms_norm", "layer_norm")):
        spec = NormSpec(kind, eps)
        pairs = zip(inputs, outputs, strict=True)
        if all(compare(output, spec.reference(module, input)).within(FORMULA) for input, output in pairs):
            return spec
    return None


def small_floats(module: nn.Module) -> list[float]:
    """Return the attributes that can be an eps."""
    return [value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 1e-2]


def _agrees(spec: NormSpec, module: nn.Module, scale: float, weight: Tensor) -> bool:
    # An offset tells a norm that takes the mean off from one that does not.
    input = (probe(weight.shape[0], weight.dtype) + 0.5) * scale
    output = run_alone(module, input)
    return compare(output, spec.reference(module, input)).within(FORMULA.of(weight.dtype))


class FusedNorm(Replacement):
    """A norm in one pass: [..., N] -> [..., N]. It has the parameters, and the numbers, of the original module."""

    def __init__(self, original: nn.Module, spec: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        for name, parameter in original._parameters.items():
            self.register_parameter(name, parameter)
        vars(self).update({name: value for name, value in vars(original).items() if type(value) is float})
        self.training = False
        self.refresh()

    @property
    def copies_parameters(self) -> bool:  # type: ignore[override]
        return self._shifted is not None

    def refresh(self) -> None:
        """Update the weight plus offset. Call it after the weight changed: adding an offset takes as long as normalizing a few
        rows."""
        weight = self._parameters.get("weight")
        self._shifted = self.spec.scale(weight) if self.spec.offset else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        check_inference(self, hidden_states)
        if isinstance(
            hidden_states, LazyTensor
        ):  # the norm after decoder layers; dispatch takes as long as the norm
            hidden_states = hidden_states.tensor
        scale = self._parameters.get("weight") if self._shifted is None else self._shifted
        return self.spec.normalize(hidden_states, scale, self._parameters.get("bias"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedNorm:
        super()._apply(fn, recurse)
        self.refresh()
        return self

    def extra_repr(self) -> str:
        return f"{self.spec.kind}, eps={self.spec.eps}"


class NormRule:
    """Norms of several Python statements become one op. `nn.LayerNorm` is one op already, and stays."""

    name = "norm"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is nn.LayerNorm or not context.tree.slots[id(module)] or not is_plain(module):
            return None
        if context.skipped(path) or any(
            p.dtype not in WEIGHT_DTYPES for p in module.parameters(recurse=False)
        ):
            return None
        if len(parameters_of(module.forward)) != 1:
            return None  # a norm of graphs or with a gate: its callers give it more than the hidden states
        spec = identify_norm(module)
        return None if spec is None else Match(module, path, spec)

    def apply(self, match: Match, context: Context) -> Outcome:
        spec: NormSpec = match.data
        structure = spec.kind.replace("_", " ")
        weight = next(match.module.parameters(recurse=False))
        fused = FusedNorm(match.module, spec)
        if context.config.verify:
            input = probe(weight.shape[0], weight.dtype)
            with torch.no_grad():
                reason = compare(fused(input), match.module(input)).reason(PACKED.of("float32", weight.dtype))
            if reason is not None:
                return Outcome((PlanItem.left(match.path, structure, reason),), (match.module,))
        context.swap(match.module, fused)
        item = PlanItem(match.path, structure, spec.kind, "float32", packed_bytes=0, reason=None)
        return Outcome((item,), (match.module,))
