"""`LatentAttention`: attention to the cached latents, with keys and values computed from them only where that is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.lazy_tensor import ordinary
from hf_cpu_accel.lazy.stored_heads import readable
from hf_cpu_accel.rewrite.attention.interface import attention_forward
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.latent.parts import LatentParts
from hf_cpu_accel.rewrite.mixer.mixer import Example, FusedMixer, attending_example, is_fused

_DTYPES = (torch.float32, torch.bfloat16)
_KNOWN = frozenset({"attention_mask", "cache", "position_embeddings", "position_ids", "use_cache"})


@dataclass(frozen=True)
class _Absorbed:
    """The weights that map latents to keys and values, by heads.

    Attributes:
        key: [heads, plain features of a key, rank].
        value: [heads, rank, features of a value].
    """

    key: Tensor
    value: Tensor


class LatentAttention(FusedMixer):
    """See `FusedMixer`. Its own forward also serves unknown arguments."""

    last = "o_proj"
    _parts: LatentParts
    _absorbed: _Absorbed | None

    @property
    def first(self) -> tuple[str, ...]:
        return self._parts.query[0], "kv_a_proj_with_mqa"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = self.named(args, kwargs)
        if is_fused(self, named):
            hidden_states = ordinary(named["hidden_states"])
            check_inference(self, hidden_states)
            context = self.mix(hidden_states, {k: v for k, v in named.items() if k != "hidden_states"})
            if context is not None:
                return self._modules[self.last](context), None  # type: ignore[misc]
        return self._original_class.forward(self, *args, **kwargs)

    def mix(self, hidden_states: Tensor, named: dict[str, Any]) -> Tensor | None:
        if any(value is not None and value is not False for key, value in named.items() if key not in _KNOWN):
            return None
        if hidden_states.dtype not in _DTYPES or hidden_states.dim() != 3 or not hidden_states.numel():
            return None
        plain, turned, latent, key = self._projected(hidden_states, named)
        cache, mask = named.get("cache"), named.get("attention_mask")
        if cache is not None:
            latent, key = cache.update(latent, key, self.layer_idx)
        if self._parts.sizes.absorbs(plain.shape[1], latent.shape[2]):
            context = self._of_latents(plain, turned, latent, key, mask)
        else:
            query = torch.cat((plain, turned), dim=-1).transpose(1, 2)
            keys, values = self.expand_kv(ordinary(latent), ordinary(key))  # type: ignore[operator]
            context = self._attend(query, keys, values, mask)
        return context.flatten(2)

    def _projected(self, x: Tensor, named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return for [B, L, C] the two parts of queries [B, L, H, D], and of keys [B, 1, L, D]: first the latent."""
        parts, sizes, modules = self._parts, self._parts.sizes, self._modules
        query, latent = self.project(x)
        for name in parts.query[1:]:
            query = modules[name](query)  # type: ignore[misc]
        latent, key = latent.split((sizes.rank, sizes.turned), dim=-1)
        latent = modules["kv_a_layernorm"](latent)  # type: ignore[misc]
        query = parts.grown(query.unflatten(-1, (sizes.heads, -1)), named.get("position_ids"))
        plain, turned = query.split((sizes.plain, sizes.turned), dim=-1)
        tables = named.get("position_embeddings")
        turned, key = parts.turn(turned, tables), parts.turn(key.unsqueeze(2), tables)
        return plain, turned, latent.unsqueeze(1), key.transpose(1, 2)

    def _of_latents(self, plain: Tensor, turned: Tensor, latent: Tensor, key: Tensor, mask: Any) -> Tensor:
        absorbed = self._absorbed
        if absorbed is None or absorbed.key.dtype is not plain.dtype:
            absorbed = self._absorbed = self._absorb(plain.dtype)
        rows = plain.shape[:2]
        query = (
            torch.bmm(plain.flatten(0, 1).transpose(0, 1), absorbed.key).transpose(0, 1).unflatten(0, rows)
        )
        query = torch.cat((query, turned), dim=-1).transpose(1, 2)
        keys, latent = _side_by_side(latent, key)
        context = self._attend(query, keys, latent, mask).flatten(0, 1)
        return torch.bmm(context.transpose(0, 1), absorbed.value).transpose(0, 1).unflatten(0, rows)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return attention_forward(self, query, key, value, mask, scaling=self._parts.scale)[0]

    def _absorb(self, dtype: torch.dtype) -> _Absorbed:
        sizes, linear = self._parts.sizes, self._modules["kv_b_proj"]
        weight = linear.unpack().to(dtype).unflatten(0, (sizes.heads, -1))  # type: ignore[union-attr, operator]
        key, value = weight.split((sizes.plain, sizes.value), dim=1)
        return _Absorbed(key.contiguous(), value.mT.contiguous())

    def is_empty(self, cache: Any) -> bool:
        return int(cache.get_seq_length(self.layer_idx)) == 0

    def example(self, batch: int, tokens: int, padding: int) -> Example:
        dtype: Any = self.get_submodule(self.last).weight_dtype
        return attending_example(batch, tokens, padding, partial(self._parts.example_tables, dtype=dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> LatentAttention:
        super()._apply(fn, recurse)
        self._absorbed = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_absorbed": None}


def _side_by_side(latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, 1, L, rank + D] of both, and the latents in it; a view if a cache stores them next to each other."""
    first, second = readable(latent), readable(key)
    rank, apart = latent.shape[3], second.storage_offset() - first.storage_offset()
    if (
        apart == rank
        and first.dtype is second.dtype is not torch.int8
        and first.stride() == second.stride()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    ):
        both = first.as_strided((*first.shape[:3], rank + second.shape[3]), first.stride())
    else:
        both = torch.cat((ordinary(latent), ordinary(key)), dim=-1)
    return both, both[..., :rank]
