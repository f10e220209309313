"""The shapes in which an encoder layer takes hidden states and rotary tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal

ROTARY = "position_embeddings"
SEQUENCES = "cu_seqlens"  # the starts of concatenated sequences; see `packed_layer`


@dataclass(frozen=True)
class CallForm:
    """The form of a batch [B, L, H] and of tables [1, L, features] for a layer.

    Attributes:
        packed: rows [B * L, H] and tables of them, with `cu_seqlens`.
        leading: the rows are a batch of one, [1, B * L, H].
        flat_tables: tables are [L, features].
    """

    packed: bool = False
    leading: bool = False
    flat_tables: bool = False

    @classmethod
    def possible(cls, names: tuple[str, ...]) -> Iterator[CallForm]:
        """Yield the possible forms of a layer with these arguments, the usual ones first."""
        if SEQUENCES in names:
            yield cls(packed=True)
            yield cls(packed=True, leading=True)
            return
        yield cls()
        if ROTARY in names:
            yield cls(flat_tables=True)

    def arguments(self, hidden_states: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments of the layer; `cu_seqlens` is that of the batch's sequences if it is missing."""
        given = dict(arguments)
        batch, length = hidden_states.shape[:2]
        if self.flat_tables and ROTARY in given:
            given[ROTARY] = tuple(table[0] for table in given[ROTARY])
        if not self.packed:
            return hidden_states, given
        given.setdefault(SEQUENCES, torch.arange(batch + 1, dtype=torch.int32) * length)
        if ROTARY in given:
            given[ROTARY] = tuple(table.expand(batch, -1, -1).flatten(0, 1) for table in given[ROTARY])
        return hidden_states.flatten(0, 1)[(None,) * self.leading], given

    def call(self, layer: nn.Module, hidden_states: Tensor, arguments: dict[str, Any]) -> Any:
        """Return the output of the layer for a batch, with hidden states in its shape, or a `Refusal`."""
        states, given = self.arguments(hidden_states, arguments)
        output = call_foreign(layer, states, **given)
        if not self.packed or isinstance(output, Refusal):
            return output
        made, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(made, Tensor) or made.shape != states.shape:
            return Refusal("it does not return hidden states of the input's shape")
        made = made.view(hidden_states.shape)
        return (made, *rest) if isinstance(output, tuple) else made


BATCH = CallForm()  # the usual one
