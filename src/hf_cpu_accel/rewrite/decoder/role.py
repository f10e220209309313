"""What a decoder layer is in its model: its parts, and by which names its host passes what it attends to."""

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
    """What one call of a layer passes besides hidden states; None for what it does not pass."""

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
    """What a layer is in its model.

    Attributes:
        parts: what it is made of.
        names: of its forward's parameters after hidden_states, in their order.
        cache, mask: the names of these arguments.
        mask_form: in which form its host passes the mask.
        causal: whether it attends to no later token where it gets no mask.
        rotary: where it has its tables from, or None if it turns nothing.
        encoder, encoder_mask: names of the arguments for an encoder's output and its mask, or None if it looks at none.
        bias, cross_bias: names of the position biases that it is handed, the latter being zeros; None if it is handed none.
        slopes: the argument that ALiBi's slopes come from, or None.
        ignored: names of arguments that its host passes and that change nothing.
        cache_index: of its layer in the cache.
        rest: what it returns after the hidden states, "bias" and "cross_bias" being those of its attention; None if it returns no
            tuple.
        is_returned: whether its output leaves the model as it is.
        shared: the argument in which layers find keys and values of earlier ones, if it has to do with it.
        keeps, takes: the keys there under which it leaves its own, and looks up those of another layer, whose `cache_index` it has
            then; or None.
        skips_padding: whether left padding may be left out; else calls with such tokens take the class's own forward.
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
        """{name of an argument: field of `LayerArguments`}."""
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
        """The arguments after hidden_states by their names; a cache under an old name, which the host takes too, by the new one."""
        named = kwargs if not args else dict(zip(self.names, args, strict=False)) | kwargs
        if self.cache not in named and any(name in named for name in CACHES):
            named = {self.cache if name in CACHES else name: value for name, value in named.items()}
        return named

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerArguments | None:
        """The arguments after hidden_states by what they are; None if there is one that is not known."""
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
    """Something with the weights of a layer as the op takes them, and the runs of layers that end with it; see `BoundLayer`."""

    @property
    def bound_runs(self) -> dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]]: ...

    @property
    def weights(self) -> DecoderLayer: ...


class BoundLayer(FusedModuleMixin):
    """A layer with its weights as the op takes them, and the runs of layers that end with it.

    Attributes:
        role: what it is in its model.
        bound_runs: {length of a run: (what was bound, the bound arguments)}; see `deferred`.
    """

    role: Role
    bound_runs: dict[int, tuple[list[DecoderLayer | Tensor | None], BoundLayers]]
    _weights: DecoderLayer | None

    @property
    def weights(self) -> DecoderLayer:
        """The layer as the op takes it, with its present weights."""
        weights = self._weights  # once: another thread may forget them meanwhile
        if weights is None:
            weights = self._weights = self.role.parts.of(self)
        return weights

    def forget(self) -> None:
        """To be called when weights were cast or exchanged."""
        self._weights, self.bound_runs = None, {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BoundLayer:
        super()._apply(fn, recurse)
        self.forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "bound_runs": {}}  # views of what the modules hold


@dataclass(frozen=True)
class Biases:
    """The position biases of a layer.

    Attributes:
        own: where that of its self-attention comes from, if it is the layer's own.
        handed: the tables of those that it is handed, by the names of the arguments; None for zeros.
        names: of the arguments for self-attention and cross-attention, None for one that it is not handed.
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
    """The role without rotary tables; None if the layer returns what only itself can make."""
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
