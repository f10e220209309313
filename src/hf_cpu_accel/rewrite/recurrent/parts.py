"""What is in a mixer (what a layer with recurrence has in the place of attention), and how it is computed of that.

Hosts call the parts of such mixers by the names of the first implementations, `mamba_ssm`, `fla` and `causal_conv1d`. A name only
suggests what a part does: `match` compares what comes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.layers import Projection, Recurrence
from hf_cpu_accel.rewrite.linear.output_order import order_outputs

if TYPE_CHECKING:
    from hf_cpu_accel.generate.recurrent_states import StateSizes

States = tuple[Tensor, Tensor | None]

_OPS = torch.ops.hf_cpu_accel


@dataclass(frozen=True)
class Mixer(ABC):
    """A mixer by what its modules and numbers are.

    Attributes:
        convolution, norm: the names of the modules whose parameters the op reads; None if there is no norm.
        alone: why `recurrence` may be None.
        is_rounded: whether rounding moves small outputs far, so that it is compared as a whole, with the own forward in float32.
    """

    convolution: str
    norm: str | None

    op = ""
    alone = "its projected features would have to be reordered, scaled or clamped first"
    is_rounded = False

    @abstractmethod
    def sizes(self, module: Any) -> StateSizes:
        """Of what it remembers."""

    @property
    @abstractmethod
    def projections(self) -> tuple[str, ...]:
        """The names of the linears that the hidden states go through first."""

    def scaled(self, module: Any, hidden_states: Tensor) -> Tensor:
        """What the projections are given."""
        return hidden_states

    def prepare(self, module: Any) -> None:
        """To be called once for a module that is to be computed so, which may go on being computed in another way."""
        return

    @abstractmethod
    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        """What the projections give, each [B, L, features] -> what `out_proj` is given, the states going on.

        Args:
            tokens: bool [B, L], False where hidden_states are 0 because there is padding, or None.
        """

    @property
    def of_step(self) -> Mixer:
        """How one token behind others is mixed, for which hosts have code of its own."""
        return self

    @abstractmethod
    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        """The same between projections of `decoder_layers`, which give in their order what the linears do; None if that op cannot.

        Args:
            rest: the second projection, if it takes two.
        """

    def _convolution(self, module: Any) -> tuple[Tensor, Tensor | None]:
        convolution = module._modules[self.convolution]
        return convolution._parameters["weight"], convolution._parameters["bias"]

    def _vectors(self, module: Any) -> dict[str, Any]:
        own = module._parameters
        return {"A_log": own["A_log"], "dt_bias": own["dt_bias"], "norm_weight": self._norm_weight(module)}

    def _norm_weight(self, module: Any) -> Tensor | None:
        return None if self.norm is None else module._modules[self.norm]._parameters["weight"]


@dataclass(frozen=True)
class ShortConvolution(Mixer):
    """LFM2's."""

    op = "short_convolution"

    def sizes(self, module: Any) -> StateSizes:
        return state_sizes(self._convolution(module)[0])

    @property
    def projections(self) -> tuple[str, ...]:
        return ("in_proj",)

    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        mixed: Tensor = _OPS.short_convolution(projected[0], *self._convolution(module), states[0])
        return mixed

    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        weight, bias = self._convolution(module)
        return Recurrence(self.op, weight, bias, conv_input=2 * len(weight), gate=len(weight), rest=rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """Qwen3.5's and Qwen3-Next's.

    Attributes:
        eps: of the norm.
        interleaved: whether the projections are two, of queries, keys, values and gates head by head of keys, and likewise of what
            else there is (Qwen3-Next).
        is_ordered: whether these have been packed as if they were not interleaved.
    """

    eps: float
    interleaved: bool
    is_ordered: bool = False

    op = "gated_delta_net"

    def sizes(self, module: Any) -> StateSizes:
        state = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return state_sizes(self._convolution(module)[0], state)

    @property
    def projections(self) -> tuple[str, ...]:
        if self.interleaved:
            return "in_proj_qkvz", "in_proj_ba"
        return "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"

    def prepare(self, module: Any) -> None:
        if self.is_ordered:
            together, rest = self.projections
            keys, values = module.head_k_dim, module.head_v_dim * module.num_v_heads // module.num_k_heads
            heads = module.num_v_heads // module.num_k_heads
            order = _one_by_one(module.num_k_heads, (keys, keys, values, values))
            order_outputs(module, {together: order, rest: _one_by_one(module.num_k_heads, (heads, heads))})

    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        if self.is_ordered:
            columns = module.num_v_heads * module.head_v_dim
            mixed, gate = projected[0].tensor_split((projected[0].shape[-1] - columns,), dim=-1)
            beta, decay = projected[1].chunk(2, dim=-1)
        elif self.interleaved:
            *parts, beta, decay = module.fix_query_key_value_ordering(*projected)
            *parts, gate = (part.flatten(2) for part in parts)
            mixed = torch.cat(parts, dim=-1)
        else:
            mixed, gate, beta, decay = projected
        own = module._parameters
        output: Tensor = _OPS.gated_delta_net(
            mixed, gate, decay, beta, *self._convolution(module), own["A_log"], own["dt_bias"],
            self._norm_weight(module), self.eps, *states,
        )  # fmt: skip
        return output

    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        if self.interleaved and not self.is_ordered:
            return None
        weight, bias = self._convolution(module)
        channels, columns = len(weight), module.num_v_heads * module.head_v_dim
        return Recurrence(
            "gated_delta_net", weight, bias, conv_input=0, gate=channels, rest=rest,
            beta=channels + columns, decay=channels + columns + module.num_v_heads,
            heads=module.num_v_heads, key_heads=(channels - columns) // (2 * module.head_k_dim),
            key_dim=module.head_k_dim, value_dim=module.head_v_dim, norm_eps=self.eps, **self._vectors(module),
        )  # fmt: skip


@dataclass(frozen=True)
class StateSpace(Mixer):
    """Mamba-2's, and those of hybrids with it.

    Attributes:
        eps, norm_groups, gate_first: of the norm.
        least_dt, most_dt: the bounds of its time steps.
        bounds_steps: whether these hold for one token behind others, too.
    """

    eps: float
    norm_groups: int
    gate_first: bool
    least_dt: float = 0.0
    most_dt: float = float("inf")
    bounds_steps: bool = False

    op = "state_space"

    def sizes(self, module: Any) -> StateSizes:
        state = (module.num_heads, module.head_dim, module.ssm_state_size)
        return state_sizes(self._convolution(module)[0], state)

    @property
    def projections(self) -> tuple[str, ...]:
        return ("in_proj",)

    @property
    def of_step(self) -> StateSpace:
        return self if self.bounds_steps else replace(self, least_dt=0.0, most_dt=float("inf"))

    def scaled(self, module: Any, hidden_states: Tensor) -> Tensor:
        scale = getattr(module, "ssm_in_multiplier", 1.0)  # Falcon-H1
        return hidden_states if scale == 1.0 else hidden_states * scale

    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        (mixed,) = projected
        scales = module._buffers.get("mup_vector")
        own = module._parameters
        output: Tensor = _OPS.state_space(
            mixed if scales is None else mixed * scales, *self._convolution(module), own["A_log"], own["D"],
            own["dt_bias"], self._norm_weight(module), self.eps, self.norm_groups, self.gate_first,
            self.least_dt, self.most_dt, tokens, *states,
        )  # fmt: skip
        return output

    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        if module._buffers.get("mup_vector") is not None or getattr(module, "ssm_in_multiplier", 1.0) != 1.0:
            return None
        if self.bounds_steps:
            return None
        weight, bias = self._convolution(module)
        columns = module.num_heads * module.head_dim
        return Recurrence(
            "state_space", weight, bias, conv_input=columns, gate=0, rest=rest, decay=columns + len(weight),
            heads=module.num_heads, key_heads=(len(weight) - columns) // (2 * module.ssm_state_size),
            key_dim=module.ssm_state_size, value_dim=module.head_dim, norm_eps=self.eps,
            norm_groups=self.norm_groups, gate_first=self.gate_first, D=module._parameters["D"], **self._vectors(module),
        )  # fmt: skip


def _one_by_one(groups: int, sizes: Sequence[int]) -> Tensor:
    """int64, where to find the first part of all groups, then the second and so on, if each group has parts of `sizes`."""
    places = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in places.split(tuple(sizes), dim=1)])


def state_sizes(weight: Tensor, state: tuple[int, ...] | None = None) -> StateSizes:
    from hf_cpu_accel.generate.recurrent_states import StateSizes

    return StateSizes(weight.shape[0], weight.shape[2], state)
