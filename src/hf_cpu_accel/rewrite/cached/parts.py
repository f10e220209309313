"""Parts of attention with a KV cache.

Hosts name the parts as in Llama and Qwen. A name only suggests a part: `match` compares the outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.ops.rope import rotary_embedding
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.mixer.mixer import holds_weights

_QUERY, _KEY, _VALUE = "q_proj", "k_proj", "v_proj"
_OUTPUTS = ("o_proj", "o_proj.linear", "out_proj", "dense")
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_GATES = ("g_proj", "gate_proj")
_ROTARY = "rotary_emb"  # a module that makes tables of positions


@dataclass(frozen=True)
class CachedParts:
    """Attention by its names and numbers.

    Attributes:
        output: the path of the last linear.
        norms: the names of those of query and key heads, or None.
        norms_first: whether they come before the rotation.
        turned: features of a head that are rotated, 0 for none.
        forward: whether they rotate as in Llama; else the other way (nanochat).
        own_tables: whether the module computes the tables itself, from positions.
        gate: the name of a linear by whose sigmoid the output of attention is multiplied, a factor for each head or feature;
            or None.
    """

    output: str
    head_dim: int
    scale: float
    norms: tuple[str, str] | None
    norms_first: bool
    turned: int
    forward: bool
    own_tables: bool
    gate: str | None

    def takes(self, tables: Any) -> bool:
        """Return whether heads can be rotated by the tables that a host passes to the module."""
        return (
            not self.turned or self.own_tables or (tables is not None and tables[0].shape[-1] == self.turned)
        )

    def turn(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotate x [B, L, H, D]."""
        if not self.turned:
            return x
        assert tables is not None
        cos, sin = tables
        turned = rotary_embedding(x[..., : self.turned], cos, sin if self.forward else -sin)
        return turned if self.turned == x.shape[-1] else torch.cat((turned, x[..., self.turned :]), dim=-1)

    def example_tables(self, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return tables of random angles for positions [first, first + count), in the form of the host."""
        if self.own_tables:
            return None
        size = (1, count, (self.turned or self.head_dim) // 2)
        angles = torch.pi * torch.rand(size, generator=torch.Generator().manual_seed(first))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def candidates(module: Any) -> Iterator[CachedParts]:
    """Yield the possible parts of `module`, if it has the arguments of attention with a KV cache."""
    names = module._modules
    output = next((path for path in _OUTPUTS if _is_packed(module, path)), None)
    head_dim = getattr(module, "head_dim", None)
    if output is None or any(names.get(name) is None for name in (_QUERY, _KEY, _VALUE)):
        return
    if not isinstance(getattr(module, "layer_idx", None), int) or not isinstance(head_dim, int):
        return
    norms = next((pair for pair in _NORMS if all(names.get(name) is not None for name in pair)), None)
    gate = next((name for name in _GATES if names.get(name) is not None), None)
    known = {_QUERY, _KEY, _VALUE, output.split(".")[0], *(norms or ()), gate, _ROTARY}
    others = [part for name, part in names.items() if name not in known and part is not None]
    if module._parameters or any(map(holds_weights, others)):
        return  # sinks, or a choice of keys, which a short text may not show
    scale = getattr(module, "scaling", None)
    scale = head_dim**-0.5 if not isinstance(scale, float) else scale
    own = names.get(_ROTARY) is not None
    orders = (True, False) if norms else (True,)
    ways = [(turned, forward) for turned in _widths(module, head_dim) for forward in (True, False)]
    for (turned, forward), first in itertools.product([*ways, (0, True)], orders):
        yield CachedParts(output, head_dim, scale, norms, first, turned, forward, own and turned > 0, gate)


def _widths(module: Any, head_dim: int) -> list[int]:
    """Return the possible numbers of rotated features of a head; first the number in the config, since some modules accept
    tables of any width."""
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factors = (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None))
    widths = [*(int(head_dim * factor) for factor in factors if isinstance(factor, float)), head_dim]
    return [width for width in dict.fromkeys(widths) if width > 0 and width % 2 == 0]


def _is_packed(module: nn.Module, path: str) -> bool:
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
        if part is None:
            return False
    return isinstance(part, PackedLinear)
