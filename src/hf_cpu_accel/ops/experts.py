"""experts_ffn: the FFNs of a mixture of experts, in one call for all tokens and experts.

A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) routes each token to a few of many FFNs. For one token only the weights
of these few are read. For a prompt each expert multiplies all its tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.ops.derivatives import refuse_derivatives
from hf_cpu_accel.ops.linear import ACTIVATIONS, check_activation, quantize_rows
from hf_cpu_accel.ops.registry import by_name, declare, like_first
from hf_cpu_accel.packing.linear import PANEL_FEATURES, PackedWeight, dtype_of, unpack_linear

MAX_TOP_K = 64  # the maximum number of experts per token


@dataclass(frozen=True)
class ExpertWeights:
    """The FFNs of E experts with I intermediate and C features: down(activation(up(x))), or gated down(activation(gate(x)) *
    up(x)).

    Attributes:
        experts: E.
        up: from `packing.pack_stack`, E * I x C, or gated E * 2I x C, the gate of an expert before its up.
        down: from `packing.pack_stack`, E * C x I.
        up_bias, down_bias: one per output feature, float32 or bfloat16, or None.
        activation: one of `ops.linear.ACTIVATIONS`.
        gated: whether the experts are gated.
        limit: 0 for none; else gated experts compute activation(min(gate, limit)) * (clamp(up, -limit, limit) + 1), as gpt-oss.
    """

    experts: int
    up: PackedWeight
    up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    activation: str
    gated: bool = True
    limit: float = 0.0

    @property
    def features(self) -> int:
        return self.up.in_features

    @property
    def intermediate_features(self) -> int:
        return self.down.in_features

    def check(self) -> None:
        """Check that the sizes of the parts match.

        Raises:
            ValueError: sizes that do not fit, an unknown activation, or a limit without a gate.
        """
        check_activation(self.activation)
        rows = {
            "up": (2 if self.gated else 1) * self.intermediate_features,
            "down": self.features,
        }
        for name, width in rows.items():
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            if self.experts < 1 or weight.out_features != self.experts * width:
                raise ValueError(
                    f"{name} has {weight.out_features} output features: must be {width} for each of {self.experts} experts"
                )
            if bias is not None and bias.shape != (weight.out_features,):
                raise ValueError(
                    f"{name}_bias of shape {tuple(bias.shape)}: must be ({weight.out_features},)"
                )
        if self.features % PANEL_FEATURES or self.intermediate_features % PANEL_FEATURES:
            raise ValueError(
                f"experts of {self.intermediate_features} over {self.features} features: must be multiples of {PANEL_FEATURES}"
            )
        if self.limit < 0 or (self.limit and not self.gated):
            raise ValueError(f"limit={self.limit}: must be 0 (none), or positive with gated experts")


def experts_ffn(
    hidden_states: Tensor, expert_index: Tensor, expert_weights: Tensor, experts: ExpertWeights
) -> Tensor:
    """Compute the weighted sum of the outputs of each token's experts.

    output[t] = sum over j of expert_weights[t, j] * experts[expert_index[t, j]](hidden_states[t])

    Args:
        hidden_states: [T, C] float32 or bfloat16, any strides.
        expert_index: [T, k] int64, the experts of each token, k at most 64.
        expert_weights: [T, k] float32 or bfloat16.
        experts: the weights of the experts.

    Returns:
        [T, C] contiguous, dtype of hidden_states; sums are float32.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: an index in expert_index is out of range, or a derivative with respect to an input is computed.
    """
    experts.check()
    if hidden_states.dim() != 2 or hidden_states.shape[1] != experts.features:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}: must be [tokens, {experts.features}]"
        )
    shape = (hidden_states.shape[0], expert_index.shape[-1] if expert_index.dim() else 0)
    if (
        expert_index.shape != shape
        or expert_weights.shape != shape
        or not 1 <= shape[1] <= min(MAX_TOP_K, experts.experts)
    ):
        raise ValueError(
            f"expert_index of shape {tuple(expert_index.shape)}, expert_weights of shape {tuple(expert_weights.shape)}: both "
            f"must be [{shape[0]}, 1 to {min(MAX_TOP_K, experts.experts)}]"
        )
    refuse_derivatives("experts_ffn", hidden_states, expert_weights)
    return torch.ops.hf_cpu_accel.experts_ffn(
        hidden_states,
        expert_index,
        expert_weights,
        experts.up.data,
        experts.up.scale,
        experts.up_bias,
        experts.down.data,
        experts.down.scale,
        experts.down_bias,
        experts.experts,
        experts.intermediate_features,
        experts.gated,
        experts.activation,
        experts.limit,
    )


_SCHEMA = (
    "experts_ffn(Tensor hidden_states, Tensor expert_index, Tensor expert_weights, Tensor up, Tensor? up_scale, Tensor? up_bias, "
    "Tensor down, Tensor? down_scale, Tensor? down_bias, SymInt experts, SymInt intermediate_features, bool gated, str activation, "
    "float limit) -> Tensor"
)


@by_name(_SCHEMA)
def experts_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch, expert by expert in float32."""
    hidden_states = given.hidden_states
    output = torch.zeros(hidden_states.shape)
    for number in range(given.experts):
        token, slot = torch.where(given.expert_index == number)
        if not len(token):
            continue
        width = (2 if given.gated else 1) * given.intermediate_features
        x = hidden_states[token].float()
        hidden = _expert(x, given.up, given.up_scale, given.up_bias, number, width)
        if given.gated:
            gate, up = hidden.chunk(2, dim=-1)
            if given.limit:
                gate, up = gate.clamp(max=given.limit), up.clamp(-given.limit, given.limit) + 1
            hidden = ACTIVATIONS[given.activation](gate) * up
        else:
            hidden = ACTIVATIONS[given.activation](hidden)
        down = _expert(hidden, given.down, given.down_scale, given.down_bias, number, x.shape[1])
        output.index_add_(0, token, down * given.expert_weights[token, slot, None].float())
    return output.to(hidden_states.dtype)


def _expert(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, number: int, width: int
) -> Tensor:
    """Run the linear layer of expert `number`; the packed weights of all experts are stored one after another."""
    dtype, first = dtype_of(weight), number * width
    stack = PackedWeight(weight, scale, x.shape[1], weight.shape[0] * PANEL_FEATURES, dtype)
    if scale is not None:
        x = quantize_rows(x, symmetric_16_bits=dtype == "int8-weight")
    return F.linear(
        x,
        unpack_linear(stack.narrow(first, width)),
        None if bias is None else bias[first : first + width].float(),
    )


declare(_SCHEMA, fake=like_first, reference=experts_reference)
