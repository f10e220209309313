"""Calls of `decoder_layers` for a case, and what the reference gives for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cpu_accel.ops.decoder.layers import (
    BoundLayers,
    bind,
    decoder_layers,
)
from hf_cpu_accel.ops.decoder.reference import decoder_layers_reference
from hf_cpu_accel.ops.kv_cache import to_storage
from tests.ops.decoder.cases import SHARING, Case, layers_of


@dataclass
class Call:
    """Arguments of one call."""

    hidden_states: Tensor
    layers: BoundLayers
    keys: list[Tensor]
    values: list[Tensor]
    past: list[int]
    rotary: list[tuple[Tensor, Tensor]]
    start: Tensor | None
    rows: Tensor | None
    mask: Tensor | None
    cross_keys: list[Tensor]
    cross_values: list[Tensor]
    cross_padding: Tensor | None
    cross_rows: Tensor | None
    per_layer_inputs: list[Tensor]

    def run(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The result, and the caches after it."""
        keys, values = ([x.clone() for x in cache] for cache in (self.keys, self.values))
        output = decoder_layers(
            self.hidden_states,
            self.layers,
            keys,
            values,
            self.past,
            rotary=self.rotary,
            start=self.start,
            rows=self.rows,
            mask=self.mask,
            cross_keys=self.cross_keys,
            cross_values=self.cross_values,
            cross_padding=self.cross_padding,
            cross_rows=self.cross_rows,
            per_layer_inputs=self.per_layer_inputs,
        )
        return output, keys, values

    def flat(self, keys: list[Tensor], values: list[Tensor]) -> tuple[object, ...]:
        tables = [table for pair in self.rotary for table in pair]
        bound = self.layers
        return (
            *(self.hidden_states, bound.weights, bound.vectors, bound.layout, bound.scalars),
            *(keys, values, self.past, tables, self.start, self.rows, self.mask),
            *(self.cross_keys, self.cross_values, self.cross_padding, self.cross_rows),
            self.per_layer_inputs,
        )

    def reference(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        keys, values = ([x.clone() for x in cache] for cache in (self.keys, self.values))
        return decoder_layers_reference(*self.flat(keys, values)), keys, values


def call_of(case: Case) -> Call:
    batch, q_len, past = case.batch, case.q_len, case.past
    kv_len = past + q_len
    # Layers that forget hold a few tokens more than their window.
    held = [
        min(past, case.window + 3 if case.window else 9) if case.forget and number % 2 == 0 else past
        for number in range(case.layers)
    ]

    def cache(dim: int, tokens: int) -> Tensor:
        storage = torch.full((batch, case.kv_heads, kv_len + 5, dim), torch.nan)
        storage[:, :, :tokens] = torch.randn(batch, case.kv_heads, tokens, dim)
        return to_storage(storage, case.cache)

    # Those of layers that share keys have the new ones in them.
    filled = [
        tokens + (q_len if case.shares_keys and number >= SHARING else 0)
        for number, tokens in enumerate(held)
    ]
    angles = torch.rand(1 if case.start else batch, q_len, case.rotary_dim // 2) * 6
    if not case.half_tables:
        twice = angles.repeat_interleave(2, dim=-1)
        angles = twice if case.rotary_interleaved else torch.cat([angles, angles], dim=-1)
    rotary = [(angles.cos().to(case.dtype), angles.sin().to(case.dtype))] if case.rotary_dim else []
    mask = {
        "none": lambda: None,
        "bool": lambda: torch.rand(batch, 1, q_len, kv_len) < 0.7,
        "float per head": lambda: torch.randn(1, case.heads, q_len, kv_len),
        "bfloat16 keys": lambda: torch.randn(batch, 1, 1, kv_len).bfloat16(),
    }[case.mask]()
    length = 0 if case.cross == "none" else 150
    beams = case.cross.startswith("beams")
    texts = (batch + 1) // 2 if beams else batch
    cross_rows = torch.arange(batch, dtype=torch.int32) // 2 if beams else None
    padding = torch.arange(length) < torch.randint(1, length + 1, (texts, 1)) if length else None
    crossing = (
        {
            "padding": padding,
            "holes": torch.rand(batch, length) < 0.6,
            "beams, padding": padding.repeat_interleave(2, dim=0)[:batch],
        }
        if length
        else {}
    )

    def encoded(dim: int) -> list[Tensor]:
        """Strided as the encoder's projections leave them."""
        count = case.layers if length else 0
        return [
            to_storage(torch.randn(texts, length, 3, dim), case.cache).transpose(1, 2) for _ in range(count)
        ]

    bound = bind(layers_of(case))
    # Views of one tensor, as models have them.
    own = torch.randn(batch, q_len, max(bound.per_layer_inputs, 1), case.per_layer).to(case.dtype)
    return Call(
        torch.randn(batch, q_len, case.features).to(case.dtype),
        bound,
        [cache(case.head_dim, tokens) for tokens in filled],
        [cache(case.value_dim, tokens) for tokens in filled],
        held,
        rotary,
        torch.randint(0, kv_len, (batch,), dtype=torch.int32) if case.start else None,
        torch.randint(0, batch, (batch, past + 2), dtype=torch.int32) if case.rows else None,
        mask,
        encoded(8),
        encoded(12),
        crossing.get(case.cross),
        cross_rows,
        list(own.unbind(2))[: bound.per_layer_inputs],
    )
