"""`FusedMixerLayer`: a layer with a fused mixer, including its norms, projections and feed-forward network, in a few ops.

It computes x + s post(mixer(norm(x))), then, if there is one, the same with other norms and a feed-forward network. post is
optional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import with_our_cache_name
from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference
from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.linear.dispatch import GatedFFNWork, LinearWork
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.mixer.mixer import FusedMixer, is_fused, reference_call

# A product with a second input that is added to it.
AddTo = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GatedParts:
    """A gated feed-forward network by the paths of its linears in the layer.

    Attributes:
        ups: those of gate and value, in the order of their features: one linear for both, or two side by side.
        gate_last: whether the gate is the second half.
    """

    ups: tuple[str, ...]
    down: str
    activation: str
    gate_last: bool

    @property
    def module(self) -> str:
        """Return the name of the module that contains them."""
        return self.down.partition(".")[0]

    def bind(self, layer: nn.Module, *, residual: bool) -> Route:
        ups: list[Any] = [layer.get_submodule(path) for path in self.ups]
        down = layer.get_submodule(self.down)
        assert isinstance(down, PackedLinear)
        up = ups[0].group.part(ups[0].index, ups[-1].index)
        work = GatedFFNWork(up, _part(down), self.activation, gate_last=self.gate_last, residual=residual)
        return Route(work, measured=ups[0].group.measured)


@dataclass(frozen=True)
class LayerParts:
    """A layer by the names of its parts.

    Attributes:
        ffn: the feed-forward network as one op, or the name of a module that computes it (experts); or two of these, whose
            outputs are added (experts, and one that gets all tokens); or empty, and then ffn_norm is, too.
        scale: of both branches.
        post, ffn_post: norms or layer scales after the branches, or None.
        nones: how many `None`s the layer returns after its hidden states.
    """

    mixer: str
    norm: str
    ffn_norm: str | None
    ffn: tuple[GatedParts | str, ...]
    scale: float
    post: str | None = None
    ffn_post: str | None = None
    nones: int = 0

    @property
    def chooses(self) -> bool:
        """Return whether tokens may go to experts."""
        return any(isinstance(part, str) for part in self.ffn)


class Step(Protocol):
    """A strategy that defers a layer's computation to a call for several layers. It may hold values derived from the layer's
    weights."""

    def defer(self, layer: nn.Module, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        """Return the hidden states of the layer, computed or not, or None, without changing anything, for a call that is not
        deferred."""

    def forget(self) -> None:
        """Forget derived values. Call it after weights are cast or replaced."""


class FusedMixerLayer(FusedModuleMixin):
    """Mixed into the layer's own class: [B, L, C] -> [B, L, C], or a tuple of that and `None`s.

    Calls that its mixer does not support, and those with more than one positional argument, run the own forward.
    """

    _parts: LayerParts
    _names: tuple[str, ...]  # of the parameters of its forward
    _bound: _Bound | None
    _step: Step | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [B, L, C] and the arguments of the original; returns what the original returns."""
        named = with_our_cache_name(self._names, kwargs)
        if not args and is_fused(self, named):
            output = None
            if self._step is not None:
                check_inference(self, hidden_states)
                output = self._step.defer(self, hidden_states, named)
            if output is None:
                output = self._run_fused(ordinary(hidden_states), named)
            if output is not None:
                nones = self._parts.nones
                return (output, *[None] * nones) if nones else output
        return self._original_class.forward(self, hidden_states, *args, **kwargs)

    @property
    def copies_parameters(self) -> bool:  # type: ignore[override]
        return self._step is not None  # which may hold values derived from them

    def _run_fused(self, x: Tensor, named: dict[str, Any]) -> Tensor | None:
        check_inference(self, x)
        bound = self._bound or self._bind()
        mixer = bound.mixer
        if not isinstance(mixer, FusedMixer):  # it went back to its own forward
            return None
        mixed = mixer.mix(bound.norm(x), named)
        if mixed is None:
            return None
        x = bound.leave(mixed, x)
        return x if bound.feed_forward is None else bound.feed_forward(bound.ffn_norm(x), x)

    def _bind(self) -> _Bound:
        self._bound = _Bound.of(self, self._parts)
        return self._bound

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        if len(args) > 1:
            return None
        named = {**({"hidden_states": args[0]} if args else {}), **kwargs}
        mixer: Any = self._modules[self._parts.mixer]
        reference = reference_call(self, mixer, with_our_cache_name(self._names, named))
        return replace(reference, moves_rows=self._parts.chooses) if reference else None

    def _apply(self, fn: Any, recurse: bool = True) -> FusedMixerLayer:
        super()._apply(fn, recurse)
        self._bound = None  # holds copies of biases
        if self._step is not None:
            self._step.forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}


@dataclass(frozen=True)
class _Bound:
    """A layer's modules and routes.

    Attributes:
        leave, feed_forward: the last product of a branch, and the sum.
    """

    mixer: Any
    norm: Any
    ffn_norm: Any
    leave: AddTo
    feed_forward: AddTo | None

    @classmethod
    def of(cls, layer: nn.Module, parts: LayerParts) -> _Bound:
        mixer: Any = layer._modules[parts.mixer]
        plain = parts.scale == 1.0 and parts.post is None
        ffn_plain = parts.scale == 1.0 and parts.ffn_post is None
        out = mixer.get_submodule(mixer.last)
        leave: Any = Route(LinearWork(_part(out), residual=plain), measured=out.group.measured)
        return cls(
            mixer,
            layer._modules[parts.norm],
            None if parts.ffn_norm is None else layer._modules[parts.ffn_norm],
            leave if plain else _added(leave, layer, parts.post, parts.scale),
            _feed_forward(layer, parts, plain=ffn_plain) if parts.ffn else None,
        )


def _feed_forward(layer: nn.Module, parts: LayerParts, *, plain: bool) -> AddTo:
    """Return the function that adds the feed-forward network.

    Args:
        plain: whether its output is added without a norm or scale.
    """
    if plain:
        return _one_after_another([_plain(layer, part) for part in parts.ffn])
    branches = [_branch(layer, part) for part in parts.ffn]
    return _added(branches[0] if len(branches) == 1 else _sum(branches), layer, parts.ffn_post, parts.scale)


def _plain(layer: nn.Module, part: GatedParts | str) -> AddTo:
    if isinstance(part, GatedParts):
        return part.bind(layer, residual=True)
    return _added(_branch(layer, part), layer, None, 1.0)


def _branch(layer: nn.Module, part: GatedParts | str) -> Callable[[Tensor], Tensor]:
    return (
        part.bind(layer, residual=False)
        if isinstance(part, GatedParts)
        else _first_output(layer._modules[part])
    )


def _one_after_another(steps: list[AddTo]) -> AddTo:
    if len(steps) == 1:
        return steps[0]
    first, second = steps
    return lambda input, x: second(input, first(input, x))


def _sum(branches: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    first, second = branches
    return lambda input: first(input) + second(input)


def _first_output(module: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of `module` that returns [B, L, C], also from [B * L, C], without its router outputs."""

    def call(input: Tensor) -> Tensor:
        output = module(input)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first.view(input.shape)

    return call


def _part(linear: PackedLinear) -> Any:
    return linear.group.part(linear.index, linear.index)


def _added(branch: Callable[[Tensor], Tensor], layer: nn.Module, post: str | None, scale: float) -> AddTo:
    if post is None:
        return lambda input, x: torch.add(x, branch(input), alpha=scale)
    norm: Any = layer._modules[post]
    return lambda input, x: torch.add(x, norm(branch(input)), alpha=scale)
