"""Parts of latent attention, and the choice between its two computations.

The hidden states are projected to a latent of each token, which all heads share, and a key that is rotated by its position; the
cache holds these two. Keys and values of a head are products of the latent: k_h = [W_h c, r], v_h = U_h c. A query may be
multiplied by W_h^T instead of every key by W_h, and the output of attention by U_h instead of every value: then the heads attend
to the latents themselves, like one key and value head (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Hosts name the parts as in the first implementation. A name only suggests a part: `match` compares the outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.ops.rope import rotary_embedding
from hf_cpu_accel.rewrite.mixer.mixer import holds_weights

# How positions rotate features (2i, 2i + 1) or (i, i + D/2) of a head: "halves" as in Llama; "pairs", which moves pairs to
# the places of halves; "complex", by complex factors; None: no rotation.
Rotation = Literal["halves", "pairs", "complex"] | None
ROTATIONS: tuple[Rotation, ...] = ("pairs", "halves", "complex", None)

_NAMES = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_SIZES = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention.

    Attributes:
        heads, rank: heads, and features of the latent of a token.
        plain, turned: features of a key that do not depend on its position, and of those that do.
        value: features of a value.
    """

    heads: int
    rank: int
    plain: int
    turned: int
    value: int

    def absorbs(self, q_len: int, kv_len: int) -> bool:
        """Return whether attending to latents is cheaper than computing keys and values of all of them."""
        made = self.rank * (self.plain + self.value)
        heads = self.plain + self.turned + self.value
        return q_len * (made + kv_len * (2 * self.rank + self.turned)) < kv_len * (made + q_len * heads)


@dataclass(frozen=True)
class LatentParts:
    """Latent attention by its names and numbers.

    Attributes:
        query: the names of the query projection; or of two linears and the norm between them.
        rotation: see `ROTATIONS`.
        growth: (factor, length): queries at position p are multiplied by 1 + factor log(1 + p // length) (Llama 4).
    """

    query: tuple[str, ...]
    sizes: LatentSizes
    scale: float
    rotation: Rotation
    growth: tuple[float, int] | None

    def turn(self, x: Tensor, tables: Any) -> Tensor:
        """Rotate x [B, L, H, D] by its positions; `tables` in the form of the host."""
        if self.rotation is None:
            return x
        if self.rotation == "complex":
            return rotary_embedding(
                x, *remember(tables, "cos, sin", lambda: _of_pairs(tables)), interleaved=True
            )
        if self.rotation == "pairs":
            x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return rotary_embedding(x, *tables)

    def grown(self, query: Tensor, positions: Tensor | None) -> Tensor:
        """Return the scaled query [B, L, H, D]."""
        if self.growth is None or positions is None:
            return query
        factor, length = self.growth
        grown = 1 + factor * torch.log(1 + torch.floor(positions / length))
        return query * grown[..., None, None].to(query.dtype)

    def example_tables(self, first: int, count: int, dtype: torch.dtype) -> Any:
        """Return tables of random angles for positions [first, first + count), in the form of the host."""
        if self.rotation is None:
            return None
        generator = torch.Generator().manual_seed(first)
        angles = math.pi * torch.rand(1, count, self.sizes.turned // 2, generator=generator)
        if self.rotation == "complex":
            return torch.polar(torch.ones_like(angles), angles)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def candidates(module: Any) -> list[LatentParts]:
    """Return the possible parts of `module`, if it has the arguments of latent attention; else none."""
    names = module._modules
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    if not has_sizes or any(names.get(name) is None for name in _NAMES) or not hasattr(module, "expand_kv"):
        return []
    ways = ("q_proj",), ("q_a_proj", "q_a_layernorm", "q_b_proj")
    query = next((way for way in ways if all(isinstance(names.get(name), nn.Module) for name in way)), None)
    scale = getattr(module, "scaling", None)
    if query is None or not isinstance(scale, float):
        return []
    others = [part for name, part in names.items() if name not in (*_NAMES, *query) and part is not None]
    if module._parameters or any(map(holds_weights, others)):
        return []  # for example an indexer, which selects among the keys of long texts only
    heads, rank, plain, turned, value = (getattr(module, name) for name in _SIZES[:-1])
    sizes = LatentSizes(heads, rank, plain, turned, value)
    growths = [_growth(module), None] if _growth(module) else [None]
    return [
        LatentParts(query, sizes, scale, rotation, growth) for rotation in ROTATIONS for growth in growths
    ]


def _growth(module: Any) -> tuple[float, int] | None:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    factor, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return None if factor is None or length is None else (float(factor), int(length))


def _of_pairs(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, L, D] of complex [B, L, D / 2]."""
    cos, sin = (part.float().repeat_interleave(2, dim=-1) for part in (factors.real, factors.imag))
    return cos, sin
