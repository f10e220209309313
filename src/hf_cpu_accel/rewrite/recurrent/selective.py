"""Mamba's mixer, which has projections between its convolution and its recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.layers import Projection, Recurrence
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.norm.match import FusedNorm
from hf_cpu_accel.rewrite.recurrent.parts import Mixer, States, state_sizes

if TYPE_CHECKING:
    from hf_cpu_accel.generate.recurrent_states import StateSizes

_OPS = torch.ops.hf_cpu_accel


@dataclass(frozen=True)
class SelectiveStateSpace(Mixer):
    """The mixer of Mamba and of Jamba.

    Attributes:
        norms: the names of the norms of dt, B and C, or None.
    """

    norms: tuple[str, str, str] | None

    op = "selective_scan"
    alone = "its projections after the convolution are not packed, or their norms are not RMS norms with weights and one eps"
    is_rounded = True  # dt, which goes through exp

    def sizes(self, module: Any) -> StateSizes:
        return state_sizes(self._convolution(module)[0], tuple(module._parameters["A_log"].shape))

    @property
    def projections(self) -> tuple[str, ...]:
        return ("in_proj",)

    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        own, modules = module._parameters, module._modules
        conv_state, state = states
        input, gate = projected[0].chunk(2, dim=-1)
        x = _OPS.causal_convolution(input, *self._convolution(module), tokens, conv_state).to(gate.dtype)
        selected = modules["x_proj"](x)
        features = own["A_log"].shape[1]
        parts = selected.split((selected.shape[-1] - 2 * features, features, features), dim=-1)
        if self.norms is not None:
            parts = [modules[name](part) for name, part in zip(self.norms, parts, strict=True)]
        dt, B, C = parts
        output: Tensor = _OPS.selective_scan(
            x, modules["dt_proj"](dt), B, C, gate, own["A_log"], own["D"], state
        )
        return output

    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        own, modules = module._parameters, module._modules
        linears: list[Any] = [modules["x_proj"], modules["dt_proj"]]
        if not all(isinstance(linear, PackedLinear) for linear in linears):
            return None
        weight, bias = self._convolution(module)
        features = own["A_log"].shape[1]
        norms = self._norms(module)
        if norms is None:
            return None
        selected, steps = (Projection(*linear.group.weight(linear.index, linear.index)) for linear in linears)
        scales: dict[str, Any] = {
            f"{name}_norm": norm for name, norm in zip(("dt", "B", "C"), norms[1], strict=False)
        }
        return Recurrence(
            "selective_scan", weight, bias, conv_input=0, gate=len(weight), rest=rest, key_dim=features, A_log=own["A_log"],
            D=own["D"], norm_eps=norms[0], selected=selected, steps=steps, **scales,
        )  # fmt: skip

    def _norms(self, module: Any) -> tuple[float, list[Tensor]] | None:
        """Return eps and the weights of the norms, or None if they are not RMS norms with weights and one eps."""
        norms: list[Any] = [module._modules[name] for name in self.norms or ()]
        if not all(isinstance(norm, FusedNorm) and norm.spec.kind == "rms_norm" for norm in norms):
            return None
        eps = {norm.spec.eps for norm in norms} or {0.0}
        weights = [norm.spec.scale(norm._parameters["weight"]) for norm in norms]
        return (eps.pop(), weights) if len(eps) == 1 else None
