"""Layer fusion for decoders: a layer in one op call, and consecutive layers in one call together.

The host's loop over its layers stays. A layer that is called only records its arguments, and returns hidden states that are
`DeferredHiddenStates`. The norm after the last layer, or an earlier reader, computes all layers so far at once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import of_own_keys
from hf_cpu_accel.hosts.output_capturing import is_collecting
from hf_cpu_accel.lazy.causal_mask import CausalMask
from hf_cpu_accel.lazy.position_bias import PositionBias
from hf_cpu_accel.lazy.shared_heads import KeptHeads, kept_heads
from hf_cpu_accel.patching.accelerated_module import CopiedParameter
from hf_cpu_accel.patching.fused_module import Reference, fused_layer
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.providers.layer import native_everywhere
from hf_cpu_accel.rewrite.attention.paged import in_place
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.decoder.caches import cross_layer, start_of, storage_of
from hf_cpu_accel.rewrite.decoder.cross_attention import EncoderMemory, key_padding
from hf_cpu_accel.rewrite.decoder.deferred import Call, DeferredHiddenStates, is_handed_on
from hf_cpu_accel.rewrite.decoder.experts_parts import MixtureParts
from hf_cpu_accel.rewrite.decoder.masks import attending, convert_mask, has_padded_queries, tokens_of
from hf_cpu_accel.rewrite.decoder.role import BoundLayer, LayerArguments, Role
from hf_cpu_accel.runtime.tracing import is_tracing

if TYPE_CHECKING:
    from transformers import Cache


class FusedDecoderLayer(BoundLayer):
    """Mixed into the layer's own class by `fuse`: the children, hooks and attributes are those of the original.

    A call that needs more than the op supports (attention weights, a quantized or offloaded cache, a custom mask) runs the
    class's own forward, over the same packed linears. So does a call while hooks watch the modules inside, and one with so many
    tokens that other providers compute the linears faster than fusing does.
    """

    copies_parameters = True
    _hooks_of_next: dict[int, Any]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [B, L, C] and the arguments of the original; returns what the original returns."""
        call = self._understand(hidden_states, args, kwargs)
        if call is None:
            if kwargs.get(self.role.cache) is not None:
                kwargs[self.role.cache] = in_place(kwargs[self.role.cache])
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        check_inference(self, hidden_states)
        rest = tuple(self._bias(kind, call, hidden_states) for kind in self.role.rest or ())
        deferred = DeferredHiddenStates.after(hidden_states, call)
        if call.keeps is not None:
            assert self.role.shared is not None
            parts = self.role.parts
            sizes = (hidden_states.shape[0], parts.kv_heads, parts.head_dim, parts.value_dim)
            handed = call.keeps.handed(sizes, hidden_states.dtype)
            self.role.named(args, kwargs)[self.role.shared][self.role.keeps] = handed
        handed_on = self.role.is_returned or is_handed_on(self._forward_hooks, self._hooks_of_next)
        output = deferred.tensor if handed_on else deferred
        return output if self.role.rest is None else (output, *rest)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        """Return the call without the cache, for a call that begins a text."""
        hidden_states, arguments = self._named(args, kwargs)
        call = None if hidden_states is None else self._understand(hidden_states, (), arguments)
        if call is None or (call.cache is not None and call.cache.get_seq_length(self.role.cache_index)):
            return None
        return Reference(
            (hidden_states,),
            of_own_keys({**arguments, **self._beside(arguments)}, hidden_states.shape[1]),
            tokens=attending(call.mask, hidden_states.shape[1]),
            moves_rows=isinstance(self.role.parts.ffn, MixtureParts),
            dtype=None if call.cache is None else self._storage_dtype(call.cache),
            caches=self._caches(arguments),
        )

    def copied_parameters(self) -> Iterator[CopiedParameter]:
        """Yield all parameters, and the buffer with the scale of the output if there is one."""
        yield from super().copied_parameters()
        if self.role.parts.output_scale is not None:
            yield from (CopiedParameter(self._buffers, name) for name in self._buffers)

    def _beside(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return copies of the arguments that a call writes to, for a second call."""
        role = self.role
        beside: dict[str, Any] = {role.cache: None} if role.cache in arguments else {}
        return beside if role.shared is None else {**beside, role.shared: copy.copy(arguments[role.shared])}

    def _storage_dtype(self, cache: Cache) -> str | None:
        """Return the dtype in which `cache` was asked to store keys and values, or None."""
        dtype = getattr(cache.layers[self.role.cache_index], "storage_dtype", None)
        return None if dtype is None else str(dtype).removeprefix("torch.")

    def _caches(self, arguments: dict[str, Any]) -> tuple[tuple[Any, int], ...]:
        """Return the arguments that a call writes to, with the index of the layer's part."""
        role = self.role
        names = [role.cache] if role.shared is None else [role.cache, role.shared]
        values = [] if role.takes is not None else [arguments.get(name) for name in names]
        return tuple((value, role.cache_index) for value in values if value is not None)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the hidden states, and the other arguments by name."""
        if args:
            return args[0], self.role.named(args[1:], kwargs)
        given = dict(kwargs)
        hidden_states = given.pop("hidden_states", None)
        return hidden_states, self.role.named((), given)

    def _understand(
        self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Return the call for the op, or None if the op does not support all that it asks for."""
        role = self.role
        if hidden_states.dim() != 3 or is_tracing():
            return None
        given = role.arguments(args, kwargs)
        q_len = hidden_states.shape[1]
        if given is None or not self._has_arguments(given, q_len):
            return None
        cache, mask, memory = given.cache, given.mask, None
        if role.encoder is not None:
            memory = self._read_memory(given.encoder, given.encoder_mask, cache, hidden_states)
            if memory is None:
                return None
            cache = None if cache is None else cache.self_attention_cache
        if cache is not None and not self._is_ours(cache):
            return None
        takes = None if role.takes is None else kept_heads(given.shared, role.takes)
        if mask is not None:
            mask = self._read_mask(mask, hidden_states, cache, takes)
            if mask is None or (has_padded_queries(mask) and not role.skips_padding):
                return None
        if isinstance(role.parts.ffn, MixtureParts) and is_collecting("router_logits"):
            return None
        if self.is_watched_within:
            return None
        rows = hidden_states.shape[0] * q_len
        if rows >= FEWEST_ROWS and not native_everywhere(role.parts.linears(self), rows):
            return None
        if not self._biases_fit(given, mask, cache, memory, hidden_states):
            return None
        relative = self.weights.attention.relative if given.bias is None else given.bias.table
        keeps = None if role.keeps is None else self._keeps(cache, q_len, mask)
        if takes is not None and takes.heads is None and not _is_ahead(hidden_states, takes):
            given.shared[role.takes][0].tensor  # noqa: B018 (hidden states that do not come of that layer do not have it run)
        return Call(self, cache, mask, given.rotary, relative, memory, given.per_layer, keeps, takes)

    def _has_arguments(self, given: LayerArguments, q_len: int) -> bool:
        """Return whether all required arguments are there: rotary tables of `q_len` positions, a mask, and position biases."""
        role = self.role
        if role.rotary is not None and not role.rotary.fits(given.rotary, q_len):
            return False
        if given.mask is None and q_len > 1 and not role.causal:
            return False
        if not self._has_own_input(given.per_layer, q_len) or not self._has_shared(given):
            return False
        return (given.bias is None) == (role.bias is None) and (given.cross_bias is None) == (
            role.cross_bias is None
        )

    def _has_own_input(self, value: Any, q_len: int) -> bool:
        """Return whether the layer's own input has the expected size for `q_len` tokens, or is missing if the layer has none."""
        own = self.role.parts.per_layer
        if own is None or not isinstance(value, Tensor):
            return own is None and value is None
        width = own.output.linears(self)[0].in_features
        return (
            value.dim() == 3
            and value.shape[1:] == (q_len, width)
            and value.is_floating_point()
            and value.stride(2) == 1
        )

    def _has_shared(self, given: LayerArguments) -> bool:
        """Return whether the layer can store its keys for later layers, and gets those that it uses, both in a cache."""
        role = self.role
        if role.shared is None:
            return True
        if given.cache is None or not isinstance(given.shared, MutableMapping):
            return False
        kept = None if role.takes is None else kept_heads(given.shared, role.takes)
        return role.takes is None or (kept is not None and kept.cache is given.cache)

    def _keeps(self, cache: Any, q_len: int, mask: Tensor | None) -> KeptHeads:
        """Return the keys and values that a call with `cache` stores for later layers."""
        index = self.role.cache_index
        visible, first_key = cache.layers[index].get_mask_sizes(q_len)
        return KeptHeads(cache, q_len, int(cache.get_seq_length(index)), mask, int(visible), int(first_key))

    def _biases_fit(
        self,
        given: LayerArguments,
        mask: Any,
        cache: Cache | None,
        memory: EncoderMemory | None,
        states: Tensor,
    ) -> bool:
        """Return whether the biases and slopes passed for `states` [B, q_len, hidden] equal those that the op computes from its
        tables."""
        role, q_len = self.role, states.shape[1]
        past = 0 if cache is None else cache.get_seq_length(role.cache_index)
        if given.bias is not None and not _says(given.bias, q_len, past + q_len, zeros=False):
            return False
        if given.cross_bias is not None and (
            memory is None or not _says(given.cross_bias, q_len, memory.states.shape[1], zeros=True)
        ):
            return False
        if role.slopes is None:
            return True
        batch, kv_len = len(states), past + q_len
        tokens = mask.padding if isinstance(mask, CausalMask) else None
        if mask is None and start_of(cache) is not None:
            tokens = tokens_of(cache, kv_len, batch)
        return role.slopes.says(given.slopes, tokens, batch, kv_len)

    def _read_memory(self, states: Any, mask: Any, cache: Any, hidden_states: Tensor) -> EncoderMemory | None:
        """Return the encoder output for the cross-attention of the layer, or None if the op does not support it."""
        if not isinstance(states, Tensor) or states.dim() != 3 or states.shape[0] != hidden_states.shape[0]:
            return None
        if mask is not None and (not isinstance(mask, Tensor) or key_padding(mask, len(states)) is None):
            return None
        if cache is not None and cross_layer(cache, self.role.cache_index) is None:
            return None
        return EncoderMemory(states, mask, cache)

    def _bias(
        self, kind: Literal["bias", "cross_bias"] | None, call: Call, hidden_states: Tensor
    ) -> PositionBias | None:
        """Return a position bias that the original returns."""
        if kind is None:
            return None
        q_len, parts = hidden_states.shape[1], self.role.parts
        if kind == "bias":
            past = 0 if call.cache is None else call.cache.get_seq_length(self.role.cache_index)
            return PositionBias.of(call.relative, parts.heads, q_len, past + q_len, hidden_states.dtype)
        assert parts.cross is not None
        assert call.memory is not None
        length = call.memory.states.shape[1]
        return PositionBias.of(None, parts.cross.heads, q_len, length, hidden_states.dtype)

    def _read_mask(
        self, mask: Any, hidden_states: Tensor, cache: Cache | None, takes: KeptHeads | None
    ) -> CausalMask | Tensor | None:
        """Return the mask for the op, or None if the op does not support it."""
        role, (batch, q_len, _) = self.role, hidden_states.shape
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] not in (1, role.parts.heads):
            return None
        return convert_mask(
            mask, role.mask_form, role.parts.window_of_masks, cache, role.cache_index, batch, q_len, takes
        )

    def _is_ours(self, cache: Any) -> bool:
        """Return whether the op can write to `cache`."""
        if storage_of(cache, self.role.cache_index, self.role.parts.repeats) is None:
            return False
        window = self.role.parts.window
        held: int | None = getattr(cache.layers[self.role.cache_index], "sliding_window", None)
        return held is None or (window is not None and held >= window)


def _is_ahead(hidden_states: Tensor, kept: KeptHeads) -> bool:
    """Return whether computing `hidden_states` runs the layer that stores `kept`."""
    return isinstance(hidden_states, DeferredHiddenStates) and hidden_states.will_keep(kept)


def fuse(layer: nn.Module, role: Role, following: nn.Module | None = None) -> FusedDecoderLayer:
    """Return `layer` with the fused forward; the original is not changed.

    Args:
        following: the layer that the host calls next, if there is one: its forward pre-hooks may read the output of this one.
    """
    of_next = {} if following is None else following._forward_pre_hooks
    fused: FusedDecoderLayer = fused_layer(
        FusedDecoderLayer, layer, role=role, _hooks_of_next=of_next, _weights=None, bound_runs={}
    )
    return fused


def _says(bias: Any, q_len: int, kv_len: int, *, zeros: bool) -> bool:
    """Return whether `bias` is a `PositionBias` for these numbers of queries and keys, and whether it has to be all zeros."""
    return (
        isinstance(bias, PositionBias)
        and bias.shape[2:] == (q_len, kv_len)
        and (bias.table is None or not zeros)
    )
