"""Calls of attention for its tests: shapes around the sizes that the kernels cut at, and every form of mask."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 33
    kv_len: int = 33
    head_dim: int = 64
    value_dim: int = 64
    mask: str = "none"
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    global_keys: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def how(self) -> tuple[bool, float | None, float | None, int | None, int]:
        """Behind the mask, as the op and its reference take them."""
        return self.causal, self.scale, self.softcap, self.window, self.global_keys

    def __str__(self) -> str:
        sizes = f"{self.batch}x{self.heads}/{self.kv_heads}x{self.q_len}x{self.kv_len}x{self.head_dim}/{self.value_dim}"
        window = "" if self.window is None else f"-window {self.window}+{self.global_keys}"
        return f"{sizes}-{self.mask}{'-causal' if self.causal else ''}{window}-{str(self.dtype)[6:]}"


MASKS = [
    "none",
    "right padding",
    "left padding",
    "holes",
    "all padding",
    "bool per query",
    "bool keys, four dimensions",
    "float per head",
    "float keys",
    "bfloat16 per query",
    "lowest float",
]
CASES = [
    # One query, one key, sizes around the vector width, the chunk of 32 keys and the block of 256 keys.
    Case(q_len=1, kv_len=1, head_dim=1, value_dim=1),
    Case(q_len=1, kv_len=200),
    Case(q_len=1, kv_len=300, head_dim=70, value_dim=130, mask="holes"),
    Case(q_len=2, kv_len=290, head_dim=16, value_dim=80, mask="bool per query", causal=True),
    Case(heads=4, q_len=1, kv_len=290, mask="float per head"),
    Case(q_len=7, kv_len=7, head_dim=32, value_dim=32),
    Case(q_len=65, kv_len=127, head_dim=80, value_dim=40),
    Case(q_len=200, kv_len=31, head_dim=33, value_dim=7),
    Case(batch=1, q_len=40, kv_len=257),
    Case(batch=1, q_len=15, kv_len=600, head_dim=17, value_dim=48),
    Case(batch=1, heads=1, kv_heads=1, q_len=500, kv_len=3, head_dim=8, value_dim=8),
    Case(batch=1, q_len=9, kv_len=9, head_dim=300, value_dim=130),
    # Prompts and images: heads of the usual sizes, more than a tile of rows and the rest of one, more than a block of keys.
    *(
        Case(batch=1, heads=4, kv_heads=2, q_len=67, kv_len=291, head_dim=size, value_dim=size)
        for size in (64, 80, 96, 128)
    ),
    *(
        Case(batch=1, q_len=49, kv_len=49, head_dim=size, value_dim=size, causal=True)
        for size in (64, 80, 96, 128)
    ),
    # Grouped heads: the rows of a tile span several heads.
    Case(heads=6, kv_heads=2, q_len=5, kv_len=40),
    Case(heads=8, kv_heads=1, q_len=1, kv_len=70, causal=True),
    Case(heads=4, kv_heads=2, q_len=37, kv_len=37, causal=True),
    # Causal: aligned to the end of the keys; with fewer keys than queries the first queries see nothing.
    Case(q_len=130, kv_len=130, causal=True),
    Case(q_len=20, kv_len=300, causal=True),
    Case(q_len=60, kv_len=23, causal=True),
    Case(scale=0.3),
    Case(scale=-2.0),
    Case(softcap=1.5, kv_len=300),
    Case(
        softcap=50.0,
        scale=20.0,
        heads=4,
        q_len=40,
        kv_len=70,
        head_dim=80,
        mask="float per head",
        causal=True,
    ),
    Case(softcap=0.5, q_len=1, kv_len=270, mask="holes"),
    Case(softcap=3.0, q_len=67, kv_len=291, mask="bool per query"),
    # Windows: wider and narrower than a tile of rows and than a block of keys, before few rows and many, behind global keys.
    Case(q_len=300, kv_len=300, window=5),
    Case(batch=1, q_len=410, kv_len=410, window=70, mask="holes"),
    Case(batch=1, heads=4, q_len=330, kv_len=340, window=33, global_keys=10, mask="holes"),
    Case(batch=1, q_len=90, kv_len=390, window=0, global_keys=300),
    Case(q_len=70, kv_len=70, window=100, global_keys=3),
    Case(batch=1, heads=6, q_len=200, kv_len=200, window=20, causal=True, softcap=2.0),
    Case(heads=4, q_len=1, kv_len=300, window=30, global_keys=1),
    Case(batch=1, q_len=3, kv_len=700, window=250, global_keys=290),
    Case(batch=1, q_len=3, kv_len=700, window=250, causal=True),
    Case(batch=1, q_len=80, kv_len=80, window=2, global_keys=30),
    Case(q_len=60, kv_len=23, window=4, causal=True),
    Case(q_len=60, kv_len=23, window=4, global_keys=2, mask="bool per query"),
    *(Case(mask=mask, q_len=50, kv_len=50) for mask in MASKS),
    *(Case(mask=mask, q_len=12, kv_len=520, causal=True, heads=4) for mask in MASKS),
]


def inputs(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """query, key, value as transposed views of [batch, length, heads * head_dim], and the mask."""
    g = torch.Generator().manual_seed(seed)

    def heads_of(length: int, heads: int, size: int) -> Tensor:
        flat = torch.randn(case.batch, length, heads * size, generator=g).to(case.dtype)
        return flat.view(case.batch, length, heads, size).transpose(1, 2)

    query = heads_of(case.q_len, case.heads, case.head_dim)
    key = heads_of(case.kv_len, case.kv_heads, case.head_dim)
    value = heads_of(case.kv_len, case.kv_heads, case.value_dim)
    return query, key, value, make_mask(case, g)


def make_mask(case: Case, g: torch.Generator) -> Tensor | None:
    b, h, q, k = case.batch, case.heads, case.q_len, case.kv_len
    # Between 0 and all keys are text; the first sequence is full, so that sequences of one batch differ.
    length = torch.randint(0, k + 1, (b,), generator=g)
    length[:1] = k
    padding = torch.arange(k) < length[:, None]
    if case.mask == "right padding":
        return padding
    if case.mask == "left padding":
        return padding.flip(1)
    if case.mask == "holes":
        return padding & (torch.rand(b, k, generator=g) < 0.7)
    if case.mask == "all padding":
        return torch.zeros(b, k, dtype=torch.bool)
    if case.mask == "bool per query":
        return torch.rand(b, 1, q, k, generator=g) < 0.5
    if case.mask == "bool keys, four dimensions":
        return padding[:, None, None]
    if case.mask == "float per head":
        return torch.randn(1, h, q, k, generator=g)
    if case.mask == "float keys":
        return torch.where(padding, 0.0, -math.inf)[:, None, None]
    if case.mask == "bfloat16 per query":
        return torch.randn(b, 1, q, k, generator=g).bfloat16()
    if case.mask == "lowest float":
        return torch.where(padding, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    assert case.mask == "none"
    return None
