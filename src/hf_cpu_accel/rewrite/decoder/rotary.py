"""The source of the cosines and sines of a decoder layer's positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.decoder.calls import LayerCall

_POSITIONS = "position_ids"


@dataclass(frozen=True)
class RotarySource:
    """The tables of a call, (cos, sin) each [1 or B, q_len, rotary_dim or rotary_dim / 2].

    Attributes:
        argument: name of the argument that they come from.
        group: layers of one group have the same tables for the same argument.
        buffer: None if the argument is the tables; else the path of a buffer in the layer, [positions, rotary_dim] with the
            sines of all frequencies and then their cosines (GPT-J), and the argument are positions.
        halved: whether the tables hold all frequencies twice, one set after the other, while adjacent features are rotated
            (GLM).
        sines_first: whether the argument is (sin, cos) (GPT-J since transformers 5.24).
    """

    argument: str
    group: int
    buffer: str | None = None
    halved: bool = False
    sines_first: bool = False

    def fits(self, value: Any, q_len: int) -> bool:
        """Return whether `value` has `q_len` positions."""
        if self.buffer is not None:
            return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == q_len
        return isinstance(value, tuple) and len(value) == 2 and value[0].shape[-2] == q_len

    def tables(self, layer: nn.Module, value: Any) -> tuple[Tensor, Tensor]:
        """Return the tables that `layer` uses for `value`."""
        if self.buffer is not None:
            sin, cos = layer.get_buffer(self.buffer)[value].chunk(2, dim=-1)
            return cos, sin
        cos, sin = value[::-1] if self.sines_first else value
        if self.halved:
            half = cos.shape[-1] // 2
            return cos[..., :half], sin[..., :half]
        return cos, sin


def sines_first(tables: tuple[Tensor, Tensor]) -> bool:
    """Return whether a pair of tables [1 or B, q_len, features], the first position among them, is (sin, cos): there all sines
    are 0."""
    return bool((tables[0] == 0).all(dim=-1).any())


@dataclass(frozen=True)
class Rotation:
    """A use of tables: the number of rotated features of a head, and how they are paired."""

    source: RotarySource
    rotary_dim: int
    interleaved: bool


class RotaryGroups:
    """Groups of the layers of a stack with the same tables."""

    def __init__(self) -> None:
        self._tables: list[Any] = []

    def of(self, table: Any) -> int:
        """Return the number of the group with this tuple of tables, or with an equal buffer."""
        for number, known in enumerate(self._tables):
            both = isinstance(known, Tensor) and isinstance(table, Tensor)
            if known is table or (both and torch.equal(known, table)):
                return number
        self._tables.append(table)
        return len(self._tables) - 1


def rotations(layer: nn.Module, call: LayerCall, head_dim: int, groups: RotaryGroups) -> Iterator[Rotation]:
    """Yield the ways in which `layer` may use tables from its arguments or buffers, the usual ones first."""
    if call.rotary is not None:
        table = call.arguments[call.rotary]
        width, group, swapped = table[0].shape[-1], groups.of(table), sines_first(table)
        for rotary_dim, interleaved, halved in (
            (width, False, False),
            (width, True, False),
            (width, True, True),
            (2 * width, True, False),
            (2 * width, False, False),
        ):
            if rotary_dim <= head_dim:
                source = RotarySource(call.rotary, group, halved=halved, sines_first=swapped)
                yield Rotation(source, rotary_dim, interleaved)
    elif isinstance(call.arguments.get(_POSITIONS), Tensor):
        for path, buffer in layer.named_buffers():
            if buffer.dim() == 2 and buffer.is_floating_point() and buffer.shape[1] <= head_dim:
                source = RotarySource(_POSITIONS, groups.of(buffer), buffer=path)
                for interleaved in (True, False):
                    yield Rotation(source, buffer.shape[1], interleaved)
