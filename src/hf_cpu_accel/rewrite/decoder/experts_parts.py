"""Parts of the second half of a decoder layer: an FFN, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.layers import FeedForward, MixtureOfExperts, Projection
from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.experts.layer import PackedExperts
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun


@dataclass(frozen=True)
class FeedForwardParts:
    """down(norm(activation(up(x)))), where up is gate and up if `gated`."""

    up: LinearRun
    gated: bool
    activation: str
    down: LinearRun
    sub_norm: NormPart | None = None

    def of(self, layer: nn.Module) -> FeedForward:
        up, down = self.up.projection(layer), self.down.projection(layer)
        norm = None if self.sub_norm is None else self.sub_norm.norm(layer)
        return FeedForward(up, self.gated, self.activation, down, norm)

    def runs(self) -> tuple[LinearRun, ...]:
        return self.up, self.down


@dataclass(frozen=True)
class RouterParts:
    """The mapping from logits to experts and weights; see `ops.decoder_layers.MixtureOfExperts`.

    Attributes:
        weight, bias, choice_bias: paths of the parameters [E, C] and [E], the last one may be a buffer; None for none.
    """

    weight: str
    bias: str | None
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    choice_bias: str | None
    renormalize: bool
    scale: float


@dataclass(frozen=True)
class MixtureParts:
    """A mixture of experts.

    Attributes:
        experts: path of the module.
        shared: path of the expert that gets all tokens, or None.
        shared_gate: path of the parameter [1, C] by whose sigmoid its output is multiplied, or None.
    """

    experts: str
    router: RouterParts
    shared: FeedForwardParts | None
    shared_gate: str | None

    def of(self, layer: nn.Module) -> MixtureOfExperts:
        experts, router = layer.get_submodule(self.experts), self.router
        assert isinstance(experts, PackedExperts)
        return MixtureOfExperts(
            self._projection(layer),
            experts.weights,
            router.top_k,
            scoring=router.scoring,
            choice_bias=None if router.choice_bias is None else tensor_at(layer, router.choice_bias),
            renormalize=router.renormalize,
            scale=router.scale,
            shared=None if self.shared is None else self.shared.of(layer),
            shared_gate=self.shared_gate is not None,
        )

    def runs(self) -> tuple[LinearRun, ...]:
        return () if self.shared is None else self.shared.runs()

    def parameters(self) -> set[str]:
        """Return the paths of the parameters that belong to no packed module."""
        paths = (self.router.weight, self.router.bias, self.router.choice_bias, self.shared_gate)
        return {path for path in paths if path is not None}

    def _projection(self, layer: nn.Module) -> Projection:
        """Return the router and the shared expert's gate in one projection, in a dtype that keeps their values: they are small
        and sensitive."""
        weights = [
            tensor_at(layer, path) for path in (self.router.weight, self.shared_gate) if path is not None
        ]
        exact = all(weight.dtype is torch.bfloat16 for weight in weights)
        packed = pack_linear(torch.cat([w.float() for w in weights]), "bfloat16" if exact else "float32")
        if self.router.bias is None:
            return Projection(packed, None)
        bias = tensor_at(layer, self.router.bias).float()
        return Projection(packed, torch.cat([bias, bias.new_zeros(packed.out_features - len(bias))]))


def tensor_at(layer: nn.Module, path: str) -> Tensor:
    """Return the parameter or buffer at `path` in `layer`."""
    parent, _, name = path.rpartition(".")
    tensor = getattr(layer.get_submodule(parent), name)
    assert isinstance(tensor, Tensor)
    return tensor.detach()
