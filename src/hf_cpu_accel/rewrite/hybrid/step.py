"""`RecurrentStep`: how a layer with a recurrence defers its step to the call that computes the layers around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache as once
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.layers import BoundLayers, DecoderLayer, projections_around
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.rewrite.decoder.deferred import Call, DeferredHiddenStates, is_handed_on
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer

_NO_STATE = torch.empty(0)


@dataclass(frozen=True)
class RecurrentParts:
    """A layer with a recurrence by paths in it.

    Attributes:
        mixer: the name of the module with the recurrence.
        inputs: one run of its first linears, or two.
        norm, ffn_norm, post, ffn_post: ahead of the branches and of what they give; see `mixer.whole_layer.LayerParts`.
    """

    mixer: str
    inputs: tuple[LinearRun, ...]
    output: LinearRun
    ffn: FeedForwardParts
    norm: NormPart
    ffn_norm: NormPart
    post: NormPart | None
    ffn_post: NormPart | None
    scale: float

    def of(self, layer: nn.Module) -> DecoderLayer:
        """With the present weights of `layer`."""
        mixer: Any = layer._modules[self.mixer]
        first, *rest = (run.projection(layer) for run in self.inputs)
        return DecoderLayer(
            projections_around(first, self.output.projection(layer)),
            self.ffn.of(layer),
            attention_norm=self.norm.norm(layer),
            ffn_norm=self.ffn_norm.norm(layer),
            attention_post_norm=None if self.post is None else self.post.norm(layer),
            ffn_post_norm=None if self.ffn_post is None else self.ffn_post.norm(layer),
            residual_scale=self.scale,
            recurrence=mixer._mixer.recurrence(mixer, rest[0] if rest else None),
        )


@dataclass(eq=False)
class RecurrentStep:
    """A `mixer.whole_layer.Step`.

    Attributes:
        hooks_of_next: ahead of the forward of the layer or norm that follows; None if none does.
    """

    parts: RecurrentParts
    hooks_of_next: dict[int, Any] | None
    bound_runs: dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]] = field(
        default_factory=dict
    )
    _weights: DecoderLayer | None = None

    @property
    def weights(self) -> DecoderLayer:
        weights = self._weights
        assert weights is not None, "its calls are noted when it has them"
        return weights

    def forget(self) -> None:
        self._weights, self.bound_runs = None, {}

    def defer(self, layer: nn.Module, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        """Of one token per sequence, where its states are there already: what is before the first one may be padding."""
        batch, count, _ = hidden_states.shape
        cache = named.get("cache")
        if count != 1 or batch >= FEWEST_ROWS or cache is None or named.get("attention_mask") is not None:
            return None
        mixer: Any = layer._modules[self.parts.mixer]
        if not isinstance(mixer, RecurrentMixer):  # it went back to its own forward
            return None
        states = _begun_states()(cache, mixer.layer_idx, mixer._mixer.sizes(mixer), batch)
        if states is None:
            return None
        if self._weights is None:
            self._weights = self.parts.of(layer)
        conv, state = states
        call = Call(self, cache, None, None, states=(conv, _NO_STATE if state is None else state))
        deferred = DeferredHiddenStates.after(hidden_states, call)
        if self.hooks_of_next is None or is_handed_on(layer._forward_hooks, self.hooks_of_next):
            return deferred.tensor
        return deferred

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "bound_runs": {}}  # views of what the modules hold


@once
def _begun_states() -> Callable[..., Any]:
    from hf_cpu_accel.generate.recurrent_states import begun_states_of

    return begun_states_of
