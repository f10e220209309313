"""Keys and values of several sequences, all layers of one shape in one tensor: what moves a sequence is one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer

Part = list[Tensor]
"""Some positions of one sequence: per group of a layout [members, kv_heads, positions, width]."""


@dataclass(frozen=True)
class Place:
    """Where the keys and the values of a layer are: (group, member) of each; and how it passes them, as its cache layer knows."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype | None
    repeats: int


@dataclass(frozen=True)
class Layout:
    """What a model keeps of each token.

    Attributes:
        groups: (members, kv_heads, width, dtype): so many keys or values of this shape. Most models have one group.
        places: of each layer; None for those that keep nothing.
    """

    groups: tuple[tuple[int, int, int, torch.dtype], ...]
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, cache: CPUCache) -> Layout:
        """That of a cache in which there are tokens."""
        members: dict[tuple[int, int, torch.dtype], int] = {}

        def place(storage: Tensor) -> tuple[int, int]:
            shape = storage.shape[1], storage.shape[3], storage.dtype
            members[shape] = members.get(shape, 0) + 1
            return list(members).index(shape), members[shape] - 1

        places: list[Place | None] = []
        for layer in cache.layers:
            if isinstance(layer, CPUCacheLayer) and layer.key_storage is not None:
                assert layer.value_storage is not None
                keys, values = place(layer.key_storage), place(layer.value_storage)
                places.append(Place(keys, values, layer.dtype, layer.repeats))
            else:
                places.append(None)
        return cls(tuple((count, *shape) for shape, count in members.items()), tuple(places))

    @property
    def token_bytes(self) -> int:
        return sum(members * heads * width * dtype.itemsize for members, heads, width, dtype in self.groups)

    def empty(self, positions: int) -> Part:
        """Room for so many positions."""
        return [
            torch.empty(members, heads, positions, width, dtype=dtype)
            for members, heads, width, dtype in self.groups
        ]


class Storage:
    """Room for `rows` sequences of up to `capacity` tokens.

    Attributes:
        groups: per group of the layout [members, rows, kv_heads, capacity, width].
    """

    def __init__(self, layout: Layout, rows: int, capacity: int) -> None:
        self.layout, self.rows, self.capacity = layout, rows, capacity
        # Layers that are not fused read what is before a sequence with probability 0, which makes a NaN of what NaN is there.
        self.groups = [
            torch.zeros(members, rows, heads, capacity, width, dtype=dtype)
            for members, heads, width, dtype in layout.groups
        ]

    def part(self, row: int, first: int, last: int) -> Part:
        """Views of the positions `first` to `last` of a row."""
        return [group[:, row, :, first:last] for group in self.groups]

    def write(self, row: int, first: int, part: Part) -> None:
        """Copy `part` to the positions from `first` on."""
        for group, values in zip(self.groups, part, strict=True):
            group[:, row, :, first : first + values.shape[2]] = values

    def attach(self, cache: CPUCache, rows: int, length: int) -> None:
        """Let `cache` be about the first `rows` rows, in which there are `length` tokens."""
        for layer, place in zip(cache.layers, self.layout.places, strict=True):
            if place is not None:
                held: Any = layer
                held.key_storage = self.groups[place.key[0]][place.key[1], :rows]
                held.value_storage = self.groups[place.value[0]][place.value[1], :rows]
                held.dtype, held.repeats, held.length = place.dtype, place.repeats, length


def empty_cache(config: Any, dtype: torch.dtype | None) -> CPUCache:
    """A cache all of whose layers keep all tokens: windows are left to masks, so that sequences end at one position in each."""
    cache = CPUCache(config, dtype)
    cache.layers = [
        CPUCacheLayer(dtype) if isinstance(layer, CPUCacheLayer) else layer for layer in cache.layers
    ]
    return cache
