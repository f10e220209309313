"""The role of a decoder layer in its model: its parts, and the names of the arguments from its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import Tensor

from hf_cpu_accel.hosts.arguments import CACHES
from hf_cpu_accel.lazy.lazy_tensor import settled
from hf_cpu_accel.ops.decoder.layers import BoundLayers, DecoderLayer
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.core.verify import are_probabilities
from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.masks import MaskForm
from hf_cpu_accel.rewrite.decoder.parts import DecoderParts
from hf_cpu_accel.rewrite.decoder.relative_bias import RelativeBias
from hf_cpu_accel.rewrite.decoder.rotary import RotarySource
from hf_cpu_accel.rewrite.decoder.scores import Slopes
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace


@dataclass
class LayerArguments:
    """The arguments of one call of a layer besides hidden states; None for those that are not passed."""

    cache: Any = None
    mask: Any = None
    rotary: Any = None
    encoder: Any = None
    encoder_mask: Any = None
    bias: Any = None
    cross_bias: Any = None
    slopes: Any = None
    per_layer: Any = None
    shared: Any = None


@dataclass(frozen=True)
class Role:
    """The role of a layer in its model.

    Attributes:
        parts: its parts.
        names: of its forward's parameters after hidden_states, in their order.
        cache, mask: the names of these arguments.
        mask_form: the form in which its host passes the mask.
        causal: whether it attends to no later token without a mask.
        rotary: the source of its tables, or None without rotation.
        encoder, encoder_mask: names of the arguments for an encoder's output and its mask, or None without cross-attention.
        bias, cross_bias: names of the position biases among its arguments, the latter being zeros; None without.
        slopes: the argument with ALiBi's slopes, or None.
        ignored: names of arguments that its host passes and that have no effect.
        cache_index: of its layer in the cache.
        rest: its outputs after the hidden states, "bias" and "cross_bias" being those of its attention; None if it returns no
            tuple.
        is_returned: whether its output leaves the model unchanged.
        shared: the argument in which layers find keys and values of earlier ones, if the layer uses it.
        keeps, takes: the keys there under which it stores its own, and finds those of another layer, whose `cache_index` it then
            has; or None.
        skips_padding: whether left padding may be skipped; else calls with padding run the class's own forward.
    """

    parts: DecoderParts
    names: tuple[str, ...]
    cache: str
    mask: str
    mask_form: MaskForm
    causal: bool
    rotary: RotarySource | None
    encoder: str | None
    encoder_mask: str | None
    bias: str | None
    cross_bias: str | None
    slopes: Slopes | None
    ignored: frozenset[str]
    cache_index: int
    rest: tuple[Literal["bias", "cross_bias"] | None, ...] | None
    is_returned: bool
    shared: str | None = None
    keeps: str | None = None
    takes: str | None = None
    skips_padding: bool = True

    @cached_property
    def fields(self) -> dict[str, str]:
        """Return {name of an argument: field of `LayerArguments`}."""
        names = {
            "cache": self.cache,
            "mask": self.mask,
            "rotary": None if self.rotary is None else self.rotary.argument,
            "encoder": self.encoder,
            "encoder_mask": self.encoder_mask,
            "bias": self.bias,
            "cross_bias": self.cross_bias,
            "slopes": None if self.slopes is None else self.slopes.name,
            "per_layer": None if self.parts.per_layer is None else self.parts.per_layer.argument,
            "shared": self.shared,
        }
        return {name: field for field, name in names.items() if name is not None}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments after hidden_states by name; a cache under an old name, which the host accepts too, by the new
        one."""
        named = kwargs if not args else dict(zip(self.names, args, strict=False)) | kwargs
        if self.cache not in named and any(name in named for name in CACHES):
            named = {self.cache if name in CACHES else name: value for name, value in named.items()}
        return named

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerArguments | None:
        """Return the arguments after hidden_states by meaning, or None if one is unknown."""
        given = LayerArguments()
        for name, value in self.named(args, kwargs).items():
            if value is None or value is False or name in self.ignored:
                continue
            field = self.fields.get(name)
            if field is None:
                return None
            setattr(given, field, settled(value))
        return given


class Bound(Protocol):
    """An object with the weights of a layer for the op, and the runs of layers that end with it; see `BoundLayer`."""

    @property
    def bound_runs(self) -> dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]]: ...

    @property
    def weights(self) -> DecoderLayer: ...


class BoundLayer(FusedModuleMixin):
    """A layer with its weights for the op, and the runs of layers that end with it.

    Attributes:
        role: its role in the model.
        bound_runs: {length of a run: (sources of the arguments, the bound arguments)}; see `deferred`.
    """

    role: Role
    bound_runs: dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]]
    _weights: DecoderLayer | None

    @property
    def weights(self) -> DecoderLayer:
        """Return the layer for the op, with its current weights."""
        weights = self._weights  # once: another thread may forget them meanwhile
        if weights is None:
            weights = self._weights = self.role.parts.of(self)
        return weights

    def forget(self) -> None:
        """Forget bound weights. Call it after weights are cast or replaced."""
        self._weights, self.bound_runs = None, {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BoundLayer:
        super()._apply(fn, recurse)
        self.forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "bound_runs": {}}  # views of the modules' weights


@dataclass(frozen=True)
class Biases:
    """The position biases of a layer.

    Attributes:
        own: the source of the bias of its self-attention, if it is the layer's own.
        handed: the tables of those among its arguments, by name; None for zeros.
        names: of the arguments for self-attention and cross-attention, None for a bias that is no argument.
    """

    own: RelativeBias | None
    handed: dict[str, Tensor | None]
    names: tuple[str | None, ...]


def role_of(
    parts: DecoderParts,
    call: LayerCall,
    trace: DecoderTrace,
    biases: Biases,
    mask_form: MaskForm,
    slopes: Slopes | None,
) -> Role | None:
    """Return the role without rotary tables, or None if the layer returns values that only itself can compute."""
    bias, cross_bias = (*biases.names, None)[:2]
    used = [attention.bias for attention in trace.attention]
    rest: list[Literal["bias", "cross_bias"] | None] = []
    for value in trace.rest or ():
        kind = next((number for number, other in enumerate(used) if value is other is not None), None)
        if kind is None and isinstance(value, Tensor) and not are_probabilities(value):
            return None
        rest.append(None if kind is None else "bias" if kind == 0 else "cross_bias")
    argument = None if slopes is None else slopes.name
    shared = None if trace.keeps is None and trace.takes is None else call.shared
    own = None if parts.per_layer is None else parts.per_layer.argument
    known = (call.cache, call.mask, call.encoder, call.encoder_mask, bias, cross_bias, argument, shared, own)
    return Role(
        parts=parts,
        names=call.names,
        cache=call.cache,
        mask=call.mask,
        mask_form=mask_form,
        causal=False,
        rotary=None,
        encoder=call.encoder,
        encoder_mask=call.encoder_mask,
        bias=bias,
        cross_bias=cross_bias,
        slopes=slopes,
        ignored=frozenset(name for name in call.arguments if name not in known and _is_set(call, name)),
        cache_index=trace.stored[0].layer_index or 0,
        rest=None if trace.rest is None else tuple(rest),
        is_returned=False,
        shared=shared,
        keeps=trace.keeps,
        takes=trace.takes,
    )


def _is_set(call: LayerCall, name: str) -> bool:
    value = call.arguments[name]
    return value is not None and value is not False
