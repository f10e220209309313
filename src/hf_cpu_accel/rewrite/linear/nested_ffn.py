"""Layer fusion for the feed-forward networks of diffusers: the first linear is inside of one module with its activation or gate
(GEGLU, SwiGLU, GELU with a projection), the second one follows a dropout. Both, and the ops between them, become one op call.

A network is matched by its modules, whose linears are packed already; its activation by the output of the inner module with an
identity in place of its linear. The result is verified on an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.ops.linear import ACTIVATIONS
from hf_cpu_accel.packing.linear import PANEL_FEATURES
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.activations import GRID, identify
from hf_cpu_accel.rewrite.core.context import Context, refusal_to_swap
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.core.verify import probe, run
from hf_cpu_accel.rewrite.linear.dispatch import FFNWork, GatedFFNWork
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, PackedLinear, is_permuted
from hf_cpu_accel.tolerance import ACTIVATION, FFN

STRUCTURE = Structure("nested ffn", "part")


@dataclass(frozen=True)
class NestedFFN:
    """down(activation(up(x))), or with a gate down(activation(one half of up(x)) * the other half).

    Attributes:
        up, down: the paths of the linears.
        gate_last: whether the second half goes through the activation; None without a gate.
    """

    up: str
    down: str
    activation: str
    gate_last: bool | None


class FusedNestedFFN(FusedModuleMixin):
    """Mixed into the container's own class: [..., K] -> [..., N].

    The children, hooks and attributes are those of the original. Its own forward runs where hooks (of torch, or of diffusers,
    which replace forwards) read values inside, for further arguments, and while a graph is traced.
    """

    _ffn: NestedFFN
    _route: Route | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        input = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(input, Tensor) or self.is_watched or torch.compiler.is_compiling():
            return self._original_class.forward(self, *args, **kwargs)
        check_inference(self, input)
        route = self._route or self._bind()
        return route(input.tensor if isinstance(input, LazyTensor) else input)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return None if self.is_watched else Reference(args, kwargs)

    def _bind(self) -> Route:
        ffn = self._ffn
        linears = _packed(self.get_submodule(ffn.up), self.get_submodule(ffn.down))
        up, down = (linear.group.part(linear.index, linear.index) for linear in linears)
        work = (
            FFNWork(up, down, ffn.activation)
            if ffn.gate_last is None
            else GatedFFNWork(up, down, ffn.activation, gate_last=ffn.gate_last)
        )
        self._route = Route(work, measured=linears[0].group.measured)
        return self._route

    def _apply(self, fn: Any, recurse: bool = True) -> FusedNestedFFN:
        super()._apply(fn, recurse)
        self._route = None  # holds the biases
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_route": None}  # other providers' weights cannot be copied


def fuse_nested_ffns(context: Context) -> list[PlanItem]:
    """Fuse every such network of the model. Call it after linears are packed."""
    return fuse_each(context, STRUCTURE, _match_nested_ffn, _op_and_dtype)


def _op_and_dtype(fused: FusedNestedFFN, path: str) -> tuple[str, str]:
    (up,) = _packed(fused.get_submodule(fused._ffn.up))
    return "ffn" if fused._ffn.gate_last is None else "gated_ffn", up.packed_dtype


def _match_nested_ffn(layer: nn.Module, path: str, context: Context) -> FusedNestedFFN | Refusal | None:
    """Return the layer with the fused forward if both agree; None if it holds something else."""
    ffn = _guess(layer)
    if not isinstance(ffn, NestedFFN):
        return ffn
    reason = refusal_to_swap(layer, path, context)
    if reason is not None:
        return Refusal(reason)
    (up,) = _packed(layer.get_submodule(ffn.up))
    input = probe(up.in_features, up.weight_dtype)
    shadow = Shadow(layer)
    with shadow.running():
        expected = call_foreign(run, shadow.module, input)
        if isinstance(expected, Refusal):
            return expected
        given = run(_build_nested_ffn(shadow.module, ffn), input)
    comparison, allowed = compare(given, expected), FFN.of(up.weight_dtype)
    if comparison.within(allowed):
        return _build_nested_ffn(layer, ffn)
    return Refusal(f"the fused version differs by {comparison.worst:.1e} (allowed {allowed:.0e})")


def _build_nested_ffn(layer: nn.Module, ffn: NestedFFN) -> FusedNestedFFN:
    fused: FusedNestedFFN = fused_layer(FusedNestedFFN, layer, _ffn=ffn, _route=None)
    return fused


def _guess(layer: nn.Module) -> NestedFFN | Refusal | None:
    """Return the parts of a layer that holds two linears and otherwise only modules without state; None if it holds something
    else."""
    linears = [(path, child) for path, child in layer.named_modules() if isinstance(child, PackedLinear)]
    if len(linears) != 2:
        return None
    if is_permuted(layer):
        return Refusal(PERMUTED)
    (up_path, up), (down_path, down) = linears
    around, _, name = up_path.rpartition(".")
    inside = {id(module) for _, linear in linears for module in linear.modules()}
    rest = [module for module in layer.modules() if id(module) not in inside]
    if any(module._parameters or module._buffers for module in rest) or not around:
        return None
    if down_path.startswith(around + "."):
        return None
    between = _without_linear(layer.get_submodule(around), name)
    if up.out_features == down.in_features:
        activation = identify(between)
        if activation is None:
            return Refusal(f"{around} does not apply a supported activation after its linear")
        return NestedFFN(up_path, down_path, activation, None)
    if up.out_features != 2 * down.in_features or down.in_features % PANEL_FEATURES:
        return None
    for gate_last in (False, True):
        activation = _gate(between, gate_last)
        if activation is not None:
            return NestedFFN(up_path, down_path, activation, gate_last)
    return Refusal(f"{around} does not apply a gate with a supported activation after its linear")


def _without_linear(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of `module` with an identity in place of its child `name`."""
    shadow = Shadow(module)
    shadow.module._modules[name] = nn.Identity()

    def between(input: Tensor) -> Tensor:
        with shadow.running():
            output: Tensor = shadow.module(input)
            return output

    return between


def _gate(between: Callable[[Tensor], Tensor], gate_last: bool) -> str | None:
    """Return the activation of one half if `between` multiplies it by the other half, or None."""

    def gated(gate: Tensor, value: Tensor) -> Tensor:
        return between(torch.cat((value, gate) if gate_last else (gate, value)))

    activation = identify(lambda gate: gated(gate, torch.ones_like(gate)))
    if activation is None:
        return None
    value = GRID.flip(0).sin()
    expected = ACTIVATIONS[activation](GRID) * value
    return activation if compare(gated(GRID, value), expected).within(ACTIVATION) else None


def _packed(*linears: nn.Module) -> tuple[PackedLinear, ...]:
    assert all(isinstance(linear, PackedLinear) for linear in linears)
    return linears  # type: ignore[return-value]
