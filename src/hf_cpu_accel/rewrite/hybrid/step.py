"""`RecurrentStep`: defer the step of a recurrent layer to the call that computes the layers around it."""

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
from hf_cpu_accel.rewrite.decoder.experts_parts import FeedForwardParts, MixtureParts
from hf_cpu_accel.rewrite.decoder.head_norms import NormPart
from hf_cpu_accel.rewrite.linear.linear_run import LinearRun
from hf_cpu_accel.rewrite.recurrent.layer import RecurrentMixer

_DTYPES = (torch.float32, torch.bfloat16)
_NO_STATE = torch.empty(0)


@dataclass(frozen=True)
class RecurrentParts:
    """A recurrent layer by paths in it.

    Attributes:
        mixer: the name of the recurrent module.
        inputs: one run of its input projections, or two.
        norm, ffn_norm, post, ffn_post: norms before the branches and after them; see `mixer.whole_layer.LayerParts`.
    """

    mixer: str
    inputs: tuple[LinearRun, ...]
    output: LinearRun
    ffn: FeedForwardParts | MixtureParts | None
    norm: NormPart
    ffn_norm: NormPart | None
    post: NormPart | None
    ffn_post: NormPart | None
    scale: float

    def of(self, layer: nn.Module) -> DecoderLayer:
        """Return the layer with its current weights."""
        mixer: Any = layer._modules[self.mixer]
        first, *rest = (run.projection(layer) for run in self.inputs)
        return DecoderLayer(
            projections_around(first, self.output.projection(layer)),
            None if self.ffn is None else self.ffn.of(layer),
            attention_norm=self.norm.norm(layer),
            ffn_norm=None if self.ffn_norm is None else self.ffn_norm.norm(layer),
            attention_post_norm=None if self.post is None else self.post.norm(layer),
            ffn_post_norm=None if self.ffn_post is None else self.ffn_post.norm(layer),
            residual_scale=self.scale,
            recurrence=mixer._mixer.recurrence(mixer, rest[0] if rest else None),
        )


@dataclass(frozen=True, eq=False)
class _Bound:
    """See `decoder.role.Bound`. A recorded call keeps it, even if the weights of its layer are replaced meanwhile."""

    weights: DecoderLayer
    bound_runs: dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]] = field(
        default_factory=dict
    )


@dataclass(eq=False)
class RecurrentStep:
    """A `mixer.whole_layer.Step`.

    Attributes:
        hooks_of_next: pre-hooks of the layer or norm that follows; None if there is none.
    """

    parts: RecurrentParts
    hooks_of_next: dict[int, Any] | None
    _bound: _Bound | None = None

    def forget(self) -> None:
        self._bound = None

    def defer(self, layer: nn.Module, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        """Defer a step of one token per sequence with initialized states: tokens before the first one may be padding."""
        states = self._states(layer, hidden_states, named)
        if states is None:
            return None
        bound = self._bound  # once: another thread may forget it meanwhile
        if bound is None:
            bound = self._bound = _Bound(self.parts.of(layer))
        conv, state = states
        call = Call(bound, named["cache"], None, None, states=(conv, _NO_STATE if state is None else state))
        deferred = DeferredHiddenStates.after(hidden_states, call)
        if self.hooks_of_next is None or is_handed_on(layer._forward_hooks, self.hooks_of_next):
            return deferred.tensor
        return deferred

    def _states(self, layer: nn.Module, hidden_states: Tensor, named: dict[str, Any]) -> Any:
        """Return the states that a call continues from, or None if it is not deferred."""
        shape, cache = hidden_states.shape, named.get("cache")
        if (
            len(shape) != 3
            or shape[1] != 1
            or not 0 < shape[0] < FEWEST_ROWS
            or hidden_states.dtype not in _DTYPES
        ):
            return None
        mixer: Any = layer._modules[self.parts.mixer]
        if cache is None or named.get("attention_mask") is not None or not isinstance(mixer, RecurrentMixer):
            return None
        return _begun_states()(cache, mixer.layer_idx, mixer._mixer.sizes(mixer), shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}  # views of the modules' weights


@once
def _begun_states() -> Callable[..., Any]:
    from hf_cpu_accel.generate.recurrent_states import begun_states_of

    return begun_states_of
