"""One forward of a decoder layer seen from outside: what its linears, its attention and its cache were given and gave back.

The forward is that of a float32 twin of the layer: it has the same packed weights and random norms and biases, so that a scale that
happens to be 1 or a bias that is 0 in this checkpoint still shows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cpu_accel.packing import PackedWeight
from hf_cpu_accel.rewrite.attention import dispatches
from hf_cpu_accel.rewrite.decoder_calls import LayerCall
from hf_cpu_accel.rewrite.norm import FusedNorm
from hf_cpu_accel.rewrite.packed_experts import PackedExperts
from hf_cpu_accel.rewrite.packed_linear import PackedLinear
from hf_cpu_accel.rewrite.projection_group import members_apart

_OPS = torch.ops.hf_cpu_accel
_LINEAR, _FFN, _EXPERTS = _OPS.linear.default, _OPS.ffn.default, _OPS.experts_ffn.default
_CLIPS = (torch.ops.aten.clamp.default, torch.ops.aten.clamp_.default)
_IMPLEMENTATION = "_attn_implementation_internal"
_BATCH, _TOKENS, _ROUTED_TOKENS = 2, 4, 32


@dataclass(frozen=True)
class LinearCall:
    """activation(linear(input)) = output."""

    linear: PackedLinear
    input: Tensor
    output: Tensor
    activation: str


@dataclass(frozen=True)
class FFNCall:
    """down(activation(up(input))) = output, in one op."""

    up: PackedLinear
    down: PackedLinear
    activation: str
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class ExpertsCall:
    """experts(input, index, weights) = output, all [B, L, ...]."""

    experts: PackedExperts
    input: Tensor
    index: Tensor
    weights: Tensor
    output: Tensor


OpCall = LinearCall | FFNCall | ExpertsCall


@dataclass(frozen=True)
class AttentionCall:
    """What attention was called with.

    Attributes:
        query: [B, heads, L, D].
        scale: factor of the scores, None for 1 / sqrt(D).
        bias: [1, heads, L, keys], added to the scores, or None.
        scores: [B, heads, L, keys], of which a layer that computes its attention itself takes the softmax; scale and bias are in
            them.
        window, softcap, sinks: as in `ops.decoder_layers.SelfAttention`.
    """

    query: Tensor
    scale: float | None
    bias: Tensor | None = None
    scores: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Stored:
    """What went into the cache as layer `layer_index`: key and value [B, kv_heads, L, D]."""

    key: Tensor
    value: Tensor
    layer_index: int


@dataclass
class DecoderTrace:
    """One forward, in which no position is rotated.

    Attributes:
        input, output: of the layer, [B, L, C].
        encoder: what it attends to besides, [B, encoder length, C], or None.
        rest: what the layer returns after its output, None if it does not return a tuple.
        stages: the calls of packed linears and experts before anything went into the cache, after the first keys and after the
            second.
        stored: what went into the cache, in order.
        attention: the attention calls.
        clips: whether it bounds what its first linears gave (OLMoE's clip_qkv), which few values show.
    """

    input: Tensor
    encoder: Tensor | None
    output: Tensor | None = None
    rest: tuple[Any, ...] | None = None
    stages: tuple[list[OpCall], ...] = field(default_factory=lambda: ([], [], []))
    stored: list[Stored] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    clips: bool = False


def trace(layer: nn.Module, call: LayerCall, past: int = 0) -> DecoderTrace:
    """A forward of `layer`, a twin, on random hidden states and with `call`'s other arguments.

    With experts it is of more tokens: a few may go to the same experts by different rules.

    Args:
        past: how many tokens the cache pretends to hold.

    Raises:
        Exception: whatever the layer's code raises.
    """
    features = call.hidden_states.shape[-1]
    generator = torch.Generator().manual_seed(0)
    tokens = _ROUTED_TOKENS if any(isinstance(m, PackedExperts) for m in layer.modules()) else _TOKENS
    seen = DecoderTrace(torch.randn(_BATCH, tokens, features, generator=generator), None)
    arguments = {name: _unrotated(value, tokens) for name, value in call.arguments.items()}
    if call.encoder is not None:
        given = call.arguments[call.encoder]
        seen.encoder = torch.randn(_BATCH, *given.shape[1:], generator=generator)
        arguments[call.encoder] = seen.encoder
    if call.encoder_mask is not None:
        arguments[call.encoder_mask] = None
    arguments |= {call.mask: None, call.cache: _recording_cache(seen, past)}
    with (
        torch.no_grad(),
        members_apart(),
        _observed(layer, seen),
        _FunctionCalls(seen),
        _OpCalls(layer, seen),
    ):
        output = layer(seen.input, **arguments)
    seen.output, *rest = output if isinstance(output, tuple) else (output,)
    seen.rest = tuple(rest) if isinstance(output, tuple) else None
    return seen


def twin_of(layer: nn.Module) -> nn.Module:
    """A copy in float32 with the same packed weights, other norms and other biases."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        packed: tuple[PackedWeight, ...] = ()
        if isinstance(module, PackedLinear):
            packed = (module.group.packed,)
        elif isinstance(module, PackedExperts):
            packed = tuple(module.packed.values())
        for weight in packed:
            memo |= {id(part): part for part in (weight.data, weight.scale) if part is not None}
        memo |= {id(kept): kept for kept in _originals(module)}
    memo |= {id(config): copy.copy(config) for config in _configs(layer)}
    shared = set(memo)
    twin = copy.deepcopy(layer, memo)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            if id(parameter) not in shared:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.data = parameter.data.float() + noise
    for module in twin.modules():
        if isinstance(module, PackedLinear):
            module.weight_dtype = torch.float32
            module.group.forget_biases()
        elif isinstance(module, PackedExperts):
            module.weight_dtype = torch.float32
            module.forget()
        elif isinstance(module, FusedNorm):
            module.refresh()
    return twin


def _originals(module: nn.Module) -> list[nn.Parameter]:
    """The weights that are kept beside the packed ones."""
    if isinstance(module, PackedLinear):
        names: tuple[str, ...] = ("weight",)
    elif isinstance(module, PackedExperts):
        names = tuple(stack.name for stack in module.form.stacks())
    else:
        return []
    kept = (module._parameters.get(name) for name in names)
    return [parameter for parameter in kept if parameter is not None]


def _unrotated(value: Any, tokens: int) -> Any:
    """Positions at which rotary tables say nothing; other tensors in float32."""
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value) and len(value) == 2:
        cos, sin = (part[:1, :1].float().expand(1, tokens, -1) for part in value)
        return torch.ones_like(cos), torch.zeros_like(sin)
    if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
        return torch.zeros(_BATCH, tokens, dtype=value.dtype)
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        return value.float()
    return value


def _recording_cache(seen: DecoderTrace, past: int) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    class Recording(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            seen.stored.append(Stored(key_states, value_states, layer_idx))
            return key_states, value_states

    class Filled(Recording):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            key, value = super().update(*args, **kwargs)
            return (key, value) if not past else (_longer(key, past), _longer(value, past))

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return past

    return Filled() if seen.encoder is None else EncoderDecoderCache(Filled(), Recording())


def _longer(states: Tensor, past: int) -> Tensor:
    """[B, heads, past + L, D] of any values, at no cost."""
    return states[:, :, :1].expand(-1, -1, past + states.shape[2], -1)


@contextmanager
def _observed(twin: nn.Module, seen: DecoderTrace) -> Iterator[None]:
    """Attention that is dispatched by the configs of `twin`, which are its own, is noted."""
    from transformers import AttentionInterface

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        seen.attention.append(
            AttentionCall(
                query,
                kwargs.get("scaling"),
                kwargs.get("position_bias"),
                window=kwargs.get("sliding_window"),
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
            )
        )
        # Values of its own: whoever is given them next comes after attention.
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return torch.randn(shape, generator=torch.Generator().manual_seed(1 + len(seen.attention))), None

    name = f"hf_cpu_accel_probe_{id(seen)}"  # two models may be traced at the same time
    configs = [vars(config) for config in _configs(twin)]
    before = [config.get(_IMPLEMENTATION) for config in configs]
    AttentionInterface.register(name, probe)
    for config in configs:
        config[_IMPLEMENTATION] = name
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        for config, implementation in zip(configs, before, strict=True):
            config[_IMPLEMENTATION] = implementation


def _configs(layer: nn.Module) -> list[Any]:
    configs = [vars(module).get("config") for module in layer.modules() if dispatches(module)]
    return list({id(config): config for config in configs if config is not None}.values())


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_PRODUCTS_AND_SUMS = (torch.baddbmm, Tensor.baddbmm)
_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


class _FunctionCalls(TorchFunctionMode):
    """Notes attention that calls torch itself."""

    def __init__(self, seen: DecoderTrace) -> None:
        super().__init__()
        self.seen = seen
        self.open = False  # a product waits for its softmax

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            self.seen.attention.append(AttentionCall(query, kwargs.get("scale")))
        elif func in _PRODUCTS:
            self._product(*args[:2])
        elif func in _PRODUCTS_AND_SUMS:
            factors = [*args[1:3], *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs)]
            self._product(*factors)
        elif func in _SOFTMAX:
            self._softmax(args[0])
        return func(*args, **kwargs)

    def _product(self, query: Tensor, key: Tensor) -> None:
        """Notes query times the key that went into the cache, the heads side by side with the batch or not."""
        if not self.seen.stored or self.seen.attention or query.dim() not in (3, 4):
            return
        stored = self.seen.stored[0].key
        expected = stored.mT if key.dim() == 4 else stored.mT.flatten(0, 1)
        if key.shape == expected.shape and torch.equal(key, expected.to(key.dtype)):
            if query.dim() == 3:
                query = query.unflatten(0, stored.shape[:2])
            self.seen.attention.append(AttentionCall(query, None))
            self.open = True

    def _softmax(self, scores: Tensor) -> None:
        """What the product became."""
        if not self.open:
            return
        self.open = False
        call, stored = self.seen.attention[-1], self.seen.stored[0]
        shape = (*call.query.shape[:3], stored.key.shape[2])
        self.seen.attention[-1] = dataclasses.replace(call, scores=scores.detach().reshape(shape))


class _OpCalls(TorchDispatchMode):
    """Notes the calls of packed linears and experts."""

    def __init__(self, layer: nn.Module, seen: DecoderTrace) -> None:
        super().__init__()
        self.seen = seen
        self.packed = {m.packed.data.data_ptr(): m for m in layer.modules() if isinstance(m, PackedLinear)}
        self.experts = {
            m.weights.up.data.data_ptr(): m for m in layer.modules() if isinstance(m, PackedExperts)
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is _LINEAR:
            self._note(LinearCall(self.packed[args[1].data_ptr()], _rows(args[0]), _rows(output), args[6]))
        elif func is _FFN:
            up, down = (self.packed[args[place].data_ptr()] for place in (1, 4))
            self._note(FFNCall(up, down, args[10], _rows(args[0]), _rows(output)))
        elif func in _CLIPS:
            self.seen.clips |= not self.seen.stored
        elif func is _EXPERTS:
            rows = [_rows(part) for part in (*args[:3], output)]
            self._note(ExpertsCall(self.experts[args[3].data_ptr()], *rows))
        return output

    def _note(self, call: OpCall) -> None:
        self.seen.stages[min(len(self.seen.stored), 2)].append(call)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(_BATCH, -1, tensor.shape[-1])
