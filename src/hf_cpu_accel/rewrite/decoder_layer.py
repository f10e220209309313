"""Level two for decoders: a layer in one op call, and layers that follow one another in one call together.

The host's loop over its layers stays. A layer that is called only notes what it was called with, and passes on hidden states
that are `PendingHiddenStates`; the norm after the last layer, or whoever reads them before, has all layers so far computed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder_layers import DecoderLayer
from hf_cpu_accel.providers.choice import FEWEST_ROWS
from hf_cpu_accel.providers.layer import own_everywhere
from hf_cpu_accel.rewrite.causal_mask import CausalMask, read_mask
from hf_cpu_accel.rewrite.decoder_structure import DecoderParts
from hf_cpu_accel.rewrite.hooks import forward_hooks, has_foreign_hook, is_collecting
from hf_cpu_accel.rewrite.mixed_class import Mixed, empty
from hf_cpu_accel.rewrite.mixture_structure import MixtureParts
from hf_cpu_accel.rewrite.packed_linear import check_inference
from hf_cpu_accel.rewrite.pending import Call, PendingHiddenStates, Runs
from hf_cpu_accel.rewrite.rotary_source import RotarySource

if TYPE_CHECKING:
    from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer


@dataclass(frozen=True)
class Role:
    """What a layer is in its model.

    Attributes:
        parts: what it is made of.
        names: of its forward's parameters after hidden_states, in their order.
        cache, mask: the names of these arguments.
        causal: whether it attends to no later token where it gets no mask.
        rotary: where it has its tables from, or None if it turns nothing.
        ignored: names of arguments that its host passes and that change nothing.
        cache_index: of its layer in the cache.
        outputs: how many values it returns in a tuple, of which all but the first are None here; None for a tensor.
        is_returned: whether its output leaves the model as it is.
        skips_padding: whether left padding may be left out; else calls with such tokens take the class's own forward.
    """

    parts: DecoderParts
    names: tuple[str, ...]
    cache: str
    mask: str
    causal: bool
    rotary: RotarySource | None
    ignored: frozenset[str]
    cache_index: int
    outputs: int | None
    is_returned: bool
    skips_padding: bool = True


class FusedDecoderLayer(Mixed):
    """Mixed into the layer's own class by `fuse`: the children, hooks and attributes are those of the original.

    A call that asks for what the op does not do (attention weights, another cache than ours, a mask of the caller's own,
    cross-attention) takes the class's own forward, over the same packed linears. So does one while somebody watches the modules
    inside, and one with so many tokens that other providers make the linears faster than fusing them does.
    """

    role: Role
    _hooks_inside: tuple[dict[int, Any], ...]
    _weights: DecoderLayer | None
    _runs: Runs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [B, L, C] and what the original takes -> as the original."""
        call = self._understand(hidden_states, args, kwargs)
        if call is None:
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        check_inference(self, hidden_states)
        pending = PendingHiddenStates.after(hidden_states, call)
        output = pending.tensor if self.role.is_returned or self._is_watched() else pending
        outputs = self.role.outputs
        return output if outputs is None else (output, *(None,) * (outputs - 1))

    @property
    def weights(self) -> DecoderLayer:
        """The layer as the op takes it, with its present weights."""
        if self._weights is None:
            self._weights = self.role.parts.of(self)
        return self._weights

    @property
    def runs(self) -> Runs:
        """The runs that end with this layer, as far as there were any."""
        return self._runs

    def _understand(
        self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """What the op needs to know of a call; None if the op cannot do all that is asked for."""
        role = self.role
        if hidden_states.dim() != 3 or torch.compiler.is_compiling():
            return None
        arguments = kwargs if not args else dict(zip(role.names, args, strict=False)) | kwargs
        cache = mask = rotary = None
        for name, value in arguments.items():
            if value is None or value is False or name in role.ignored:
                continue
            if name == role.cache:
                cache = value
            elif name == role.mask:
                mask = value
            elif role.rotary is not None and name == role.rotary.argument:
                rotary = value
            else:
                return None
        q_len = hidden_states.shape[1]
        if role.rotary is not None and not role.rotary.fits(rotary, q_len):
            return None
        if mask is None and q_len > 1 and not role.causal:
            return None
        if cache is not None and not self._is_ours(cache):
            return None
        if mask is not None:
            mask = self._read_mask(mask, hidden_states, cache)
            if mask is None or not (role.skips_padding or _all_tokens(mask)):
                return None
        if isinstance(role.parts.ffn, MixtureParts) and is_collecting("router_logits"):
            return None
        if any(self._hooks_inside) and any(map(has_foreign_hook, self._hooks_inside)):
            return None
        rows = hidden_states.shape[0] * q_len
        if rows >= FEWEST_ROWS and not own_everywhere(role.parts.linears(self), rows):
            return None
        return Call(self, cache, mask, rotary)

    def _read_mask(self, mask: Any, hidden_states: Tensor, cache: CPUCache | None) -> CausalMask | None:
        """The mask as causality, this layer's window, and padding; None if it is not that."""
        batch, q_len, _ = hidden_states.shape
        if (
            not isinstance(mask, Tensor)
            or mask.dim() != 4
            or mask.shape[0] != batch
            or mask.shape[2] != q_len
        ):
            return None
        if not isinstance(mask, CausalMask):
            past = 0 if cache is None else cache.get_seq_length(self.role.cache_index)
            read = read_mask(mask, self.role.parts.window) if mask.shape[3] == past + q_len else None
            if read is None:
                return None
            mask = read
        return mask if mask.window == self.role.parts.window else None

    def _is_ours(self, cache: Any) -> bool:
        """Whether the op can write to `cache`."""
        cpu_cache, cpu_layer = _cache_classes()
        if not isinstance(cache, cpu_cache) or self.role.cache_index >= len(cache.layers):
            return False
        layer = cache.layers[self.role.cache_index]
        if not isinstance(layer, cpu_layer):
            return False
        window = self.role.parts.window
        held: int | None = getattr(layer, "sliding_window", None)
        return held is None or (window is not None and held >= window)

    def _is_watched(self) -> bool:
        """Whether somebody gets the hidden states after this layer who may keep them."""
        hooks = self._forward_hooks
        return bool(hooks) and (has_foreign_hook(hooks) or is_collecting("hidden_states"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedDecoderLayer:
        super()._apply(fn, recurse)
        self.forget()
        return self

    def forget(self) -> None:
        """To be called when weights were cast or exchanged."""
        self._weights, self._runs = None, Runs()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None, "_runs": Runs()}  # views of what the modules hold


def fuse(layer: nn.Module, role: Role) -> FusedDecoderLayer:
    """`layer` with the fused forward; the original is not changed."""
    fused = empty(FusedDecoderLayer, type(layer))
    assert isinstance(fused, FusedDecoderLayer)
    # The hooks' dictionaries are shared on purpose: what transformers installs on either is seen by both.
    fused.__dict__.update(vars(layer))
    hooks = [hook for child in layer.modules() if child is not layer for hook in forward_hooks(child)]
    fused.__dict__.update(
        _modules=dict(layer._modules),
        role=role,
        _hooks_inside=tuple(hooks),
        _weights=None,
        _runs=Runs(),
    )
    return fused


def _all_tokens(mask: CausalMask) -> bool:
    """Whether every query of `mask` stands at a token."""
    return mask.padding is None or bool(mask.padding[:, -mask.shape[2] :].all())


@cache
def _cache_classes() -> tuple[type[CPUCache], type[CPUCacheLayer]]:
    from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer  # imports transformers

    return CPUCache, CPUCacheLayer
