"""Storage for the keys and values of several sequences. One tensor has all layers of one shape, so one copy moves a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer

Part = list[Tensor]
"""Keys and values of some positions of one sequence, per group of a layout [members, kv_heads, positions, width]."""


@dataclass(frozen=True)
class Place:
    """The place of the keys and values of a layer.

    Attributes:
        key: (group, member) of the keys.
        value: (group, member) of the values.
        dtype: dtype in which the cache layer returns them.
        repeats: how often the cache layer repeats each head.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype | None
    repeats: int


@dataclass(frozen=True)
class Layout:
    """The keys and values that a model stores per token.

    Attributes:
        groups: (members, kv_heads, width, dtype): the number of keys or values with this shape. Most models have one group.
        places: the place of each layer; None for layers without keys and values.
    """

    groups: tuple[tuple[int, int, int, torch.dtype], ...]
    places: tuple[Place | None, ...]

    @classmethod
    def of(cls, cache: CPUCache) -> Layout:
        """Return the layout of a cache that is not empty."""
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
        """Return the size of a token in bytes."""
        return sum(members * heads * width * dtype.itemsize for members, heads, width, dtype in self.groups)

    def empty(self, positions: int) -> Part:
        """Return an uninitialized part with this number of positions."""
        return [
            torch.empty(members, heads, positions, width, dtype=dtype)
            for members, heads, width, dtype in self.groups
        ]


class Storage:
    """Storage for `rows` sequences of up to `capacity` tokens.

    Attributes:
        groups: per group of the layout [members, rows, kv_heads, capacity, width].
    """

    def __init__(self, layout: Layout, rows: int, capacity: int) -> None:
        self.layout, self.rows, self.capacity = layout, rows, capacity
        # Zeros, because layers that are not fused read the padding with probability 0, and 0 * NaN is NaN.
        self.groups = [
            torch.zeros(members, rows, heads, capacity, width, dtype=dtype)
            for members, heads, width, dtype in layout.groups
        ]

    def part(self, row: int, first: int, last: int) -> Part:
        """Return views of the positions `first` to `last` of a row."""
        return [group[:, row, :, first:last] for group in self.groups]

    def write(self, row: int, first: int, part: Part) -> None:
        """Copy `part` to the positions of a row from `first` on."""
        for group, values in zip(self.groups, part, strict=True):
            group[:, row, :, first : first + values.shape[2]] = values

    def attach(self, cache: CPUCache, rows: int, length: int) -> None:
        """Make `cache` use the first `rows` rows, which contain `length` tokens."""
        layer: Any
        for layer, place in zip(cache.layers, self.layout.places, strict=True):
            if place is not None:
                layer.key_storage = self.groups[place.key[0]][place.key[1], :rows]
                layer.value_storage = self.groups[place.value[0]][place.value[1], :rows]
                layer.dtype, layer.repeats, layer.length = place.dtype, place.repeats, length


def empty_cache(config: Any, dtype: torch.dtype | None) -> CPUCache:
    """Return an empty cache whose layers store all tokens. Masks implement sliding windows, so that all layers have one length."""
    cache = CPUCache(config, dtype)
    cache.layers = [
        CPUCacheLayer(dtype) if isinstance(layer, CPUCacheLayer) else layer for layer in cache.layers
    ]
    return cache
