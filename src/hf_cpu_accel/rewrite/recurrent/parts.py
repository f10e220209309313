"""Parts of a mixer, which a recurrent layer has in place of attention, and its computation.

Hosts name the parts of such mixers as in the first implementations, `mamba_ssm`, `fla` and `causal_conv1d`. A name only suggests
a part: `match` compares the outputs.
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
    """A mixer by its modules and numbers.

    Attributes:
        convolution, norm: the names of the modules whose parameters the op reads; None without a norm.
        alone: the reason why `recurrence` may be None.
        is_rounded: whether rounding moves small outputs far, so that it is compared as a whole, with the own forward in float32.
    """

    convolution: str
    norm: str | None

    op = ""
    alone = "its projected features would have to be reordered, scaled or clamped first"
    is_rounded = False

    @abstractmethod
    def sizes(self, module: Any) -> StateSizes:
        """Return the sizes of its states."""

    @property
    @abstractmethod
    def projections(self) -> tuple[str, ...]:
        """Return the names of the input projections."""

    def scaled(self, module: Any, hidden_states: Tensor) -> Tensor:
        """Return the input of the projections."""
        return hidden_states

    def prepare(self, module: Any) -> None:
        """Prepare a module once before it is fused; its own forward may still run."""
        return

    @abstractmethod
    def mix(self, module: Any, projected: Sequence[Tensor], tokens: Tensor | None, states: States) -> Tensor:
        """Compute the input of `out_proj` from the outputs of the projections, each [B, L, features], and update the states.

        Args:
            tokens: bool [B, L], False where hidden_states are 0 at padding, or None.
        """

    @property
    def of_step(self) -> Mixer:
        """Return the mixer for one token after others, for which hosts have their own code."""
        return self

    @abstractmethod
    def recurrence(self, module: Any, rest: Projection | None) -> Recurrence | None:
        """Return the same between projections of `decoder_layers`, which return the outputs of the linears in their order; None
        if that op does not support it.

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
    """The mixer of LFM2."""

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
    """The mixer of Qwen3.5 and Qwen3-Next.

    Attributes:
        eps: of the norm.
        interleaved: whether there are two projections, one of queries, keys, values and gates per key head, and one of the rest
            in the same order (Qwen3-Next).
        is_ordered: whether these are packed as if they were not interleaved.
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
    """The mixer of Mamba-2, and of hybrids with it.

    Attributes:
        eps, norm_groups, gate_first: of the norm.
        least_dt, most_dt: the bounds of its time steps.
        bounds_steps: whether these apply to one token after others, too.
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
    """Return int64, the places of the first part of all groups, then of the second and so on, if each group has parts of
    `sizes`."""
    places = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in places.split(tuple(sizes), dim=1)])


def state_sizes(weight: Tensor, state: tuple[int, ...] | None = None) -> StateSizes:
    from hf_cpu_accel.generate.recurrent_states import StateSizes

    return StateSizes(weight.shape[0], weight.shape[2], state)
