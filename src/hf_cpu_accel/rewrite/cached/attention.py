"""`CachedAttention`: projections, norms and rotation of heads, cache and attention, one op each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.rewrite.attention.interface import attention_forward
from hf_cpu_accel.rewrite.cached.parts import CachedParts
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.mixer.mixer import Example, FusedMixer, attending_example, is_fused

_DTYPES = (torch.float32, torch.bfloat16)
_KNOWN = frozenset({"attention_mask", "cache", "position_embeddings", "position_ids", "use_cache"})


class CachedAttention(FusedMixer):
    """See `FusedMixer`. Its own forward also serves unknown arguments."""

    _parts: CachedParts

    @property
    def last(self) -> str:  # type: ignore[override]
        return self._parts.output

    @property
    def first(self) -> tuple[str, ...]:
        return "q_proj", "k_proj", "v_proj", *((self._parts.gate,) if self._parts.gate else ())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = self.named(args, kwargs)
        if is_fused(self, named):
            hidden_states = ordinary(named["hidden_states"])
            check_inference(self, hidden_states)
            mixed = self.mix(hidden_states, {k: v for k, v in named.items() if k != "hidden_states"})
            if mixed is not None:
                return self.get_submodule(self.last)(mixed), None
        return self._original_class.forward(self, *args, **kwargs)

    def mix(self, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        if any(value is not None and value is not False for key, value in named.items() if key not in _KNOWN):
            return None
        if hidden_states.dtype not in _DTYPES or hidden_states.dim() != 3 or not hidden_states.numel():
            return None
        parts, tables = self._parts, named.get("position_embeddings")
        if not parts.takes(tables):
            return None
        projected = self.project(hidden_states)
        query, key = (x.unflatten(-1, (-1, parts.head_dim)) for x in projected[:2])
        value = projected[2].unflatten(-1, (key.shape[2], -1))
        if parts.own_tables:
            tables = self.rotary_emb(value, named.get("position_ids"))  # type: ignore[operator]
        query, key = self._placed(query, 0, tables), self._placed(key, 1, tables)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        cache, mask = named.get("cache"), named.get("attention_mask")
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        context = attention_forward(self, query, key, value, mask, scaling=parts.scale)[0]
        if parts.gate is not None:
            context = context * projected[3].sigmoid().unflatten(-1, (context.shape[2], -1))
        return context.flatten(2)

    def _placed(self, heads: Tensor, which: int, tables: Any) -> Tensor:
        """Return queries or keys [B, L, H, D], normalized and rotated."""
        parts = self._parts
        norm: Any = self._modules[parts.norms[which]] if parts.norms else None
        if norm is not None and parts.norms_first:
            heads = norm(heads)
        heads = parts.turn(heads, tables)
        return norm(heads) if norm is not None and not parts.norms_first else heads

    def is_empty(self, cache: Any) -> bool:
        return int(cache.get_seq_length(self.layer_idx)) == 0

    def example(self, batch: int, tokens: int, padding: int) -> Example:
        dtype: Any = self.get_submodule(self.last).weight_dtype
        return attending_example(batch, tokens, padding, partial(self._parts.example_tables, dtype=dtype))
