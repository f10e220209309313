"""Group norms in one op, with a following SiLU if there is one.

A residual block calls `norm`, then an activation that it also uses elsewhere, so neither module can become both. With an
activation next to it, the norm returns a tensor without values: if SiLU reads it first, one pass over memory computes both, and
any other reader gets the norm alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor, VersionGuard
from hf_cpu_accel.ops.derivatives import refuse_transforms
from hf_cpu_accel.ops.group_norm import group_norm
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.patching.replacement import Replacement
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.activations import identify
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime.tracing import is_tracing
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "group norm"


class DeferredGroupNorm(LazyTensor):
    """The output of a group norm before it is known whether SiLU follows."""

    @classmethod
    def of(cls, norm: FusedGroupNorm, input: Tensor) -> DeferredGroupNorm:
        deferred: DeferredGroupNorm = cls.like(input.shape, input.dtype, input.stride())
        deferred.norm, deferred.input = norm, VersionGuard(input, STRUCTURE)
        return deferred

    norm: FusedGroupNorm
    input: VersionGuard

    def _make(self) -> Tensor:
        return self._compute("none")

    def _compute(self, activation: str) -> Tensor:
        return self.norm.compute(self.input.tensor(), activation)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.silu.default and args[0]._tensor is None:
            return args[0]._compute("silu")
        return super().__torch_dispatch__(func, types, args, kwargs)


class FusedGroupNorm(Replacement):
    """`nn.GroupNorm` [N, C, *] -> [N, C, *], with the parameters of the original module.

    Attributes:
        activates: whether SiLU may follow.
    """

    def __init__(self, original: nn.GroupNorm, *, activates: bool) -> None:
        super().__init__()
        self.num_groups = original.num_groups
        self.num_channels = original.num_channels
        self.eps = original.eps
        self.affine = original.affine
        self.activates = activates
        for name, parameter in original._parameters.items():
            self.register_parameter(name, parameter)
        self.training = False

    def forward(self, input: Tensor) -> Tensor:
        check_inference(self, input)
        input = input.tensor if isinstance(input, LazyTensor) else input
        waits = self.activates and input.dim() > 1 and input.shape[1] == self.num_channels
        if waits and _is_dense(input) and not is_tracing():
            refuse_transforms("an accelerated group norm", input)
            return DeferredGroupNorm.of(self, input)
        return self.compute(input, "none")

    def compute(self, input: Tensor, activation: str) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        return group_norm(input, self.num_groups, weight, bias, self.eps, activation=activation)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class GroupNormRule:
    """`nn.GroupNorm` with weights in float32 or bfloat16."""

    name = "group norm"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if type(module) is not nn.GroupNorm or not context.tree.slots[id(module)] or not is_plain(module):
            return None
        if context.skipped(path) or any(p.dtype not in WEIGHT_DTYPES for p in module.parameters()):
            return None
        return Match(module, path, _beside_silu(module, context))

    def apply(self, match: Match, context: Context) -> Outcome:
        assert isinstance(match.module, nn.GroupNorm)
        fused = FusedGroupNorm(match.module, activates=match.data)
        if context.config.verify:
            weight = next(match.module.parameters(), None)
            dtype = torch.float32 if weight is None else weight.dtype
            input = torch.randn(
                2, match.module.num_channels, 5, generator=torch.Generator().manual_seed(0)
            ).to(dtype)
            with torch.no_grad():
                reason = compare(fused(input), match.module(input)).reason(PACKED.of("float32", dtype))
            if reason is not None:
                return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), (match.module,))
        context.swap(match.module, fused)
        structure = f"{STRUCTURE} + SiLU" if match.data else STRUCTURE
        item = PlanItem(match.path, structure, "group_norm", "float32", packed_bytes=0, reason=None)
        return Outcome((item,), (match.module,))


def _beside_silu(module: nn.Module, context: Context) -> bool:
    """Return whether a parent of `module` has SiLU, as a module without parameters."""
    siblings = (child for parent, _ in context.tree.slots[id(module)] for child in parent.children())
    return any(not list(child.children()) and identify(child) == "silu" for child in siblings)


def _is_dense(input: Tensor) -> bool:
    """Return whether the output of the op has the strides of `input`."""
    return input.is_contiguous() or input.movedim(1, -1).is_contiguous()
