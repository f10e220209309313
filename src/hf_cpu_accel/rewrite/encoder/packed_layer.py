"""Encoder layers over concatenated sequences, as in the vision towers of language models.

Their hidden states are [tokens, H], and `cu_seqlens`, the name in FlashAttention, has the starts of the sequences: images, or
windows in images. The host calls attention once for each. Here all are one call of the op, padded if their lengths differ, which
costs no arithmetic: padding is not computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.lazy.remember import remember
from hf_cpu_accel.ops.encoder_layer import EncoderInputs, bound_encoder_layer
from hf_cpu_accel.patching.fused_module import Reference
from hf_cpu_accel.rewrite.core.packed_module import check_inference
from hf_cpu_accel.rewrite.encoder.call_form import ROTARY, SEQUENCES
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer, accepts_rows
from hf_cpu_accel.rewrite.encoder.parts import BIAS, MASK
from hf_cpu_accel.runtime.tracing import is_tracing

_MOST_PADDED = 4  # times as much memory as without padding


@dataclass(frozen=True)
class Sequences:
    """The places of sequences of these lengths among all tokens, and in a batch [sequences, longest].

    Attributes:
        places: [tokens], in the batch with its first two dimensions flattened; None if all lengths are equal.
        padding: bool [sequences, longest], True where there is a token, or None.
    """

    lengths: tuple[int, ...]
    places: Tensor | None
    padding: Tensor | None

    @classmethod
    def of(cls, ends: Tensor) -> Sequences:
        """Return the sequences that begin and end at `ends`, [sequences + 1], without empty ones."""
        lengths = tuple(length for length in ends.diff().tolist() if length)
        if len(set(lengths)) <= 1:
            return cls(lengths, None, None)
        padding = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return cls(lengths, padding.flatten().nonzero()[:, 0], padding)

    def batch(self, rows: Tensor) -> Tensor:
        """Return [tokens, features] as [sequences, longest, features]."""
        shape = (len(self.lengths), max(self.lengths))
        if self.places is None:
            return rows.unflatten(0, shape)
        padded = rows.new_zeros(shape[0] * shape[1], rows.shape[1])
        return padded.index_copy_(0, self.places, rows).unflatten(0, shape)

    def rows(self, batch: Tensor) -> Tensor:
        """Return [sequences, longest, features] as [tokens, features]."""
        rows = batch.flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


class FusedPackedLayer(FusedEncoderLayer):
    """See `FusedEncoderLayer`; for `cu_seqlens` and hidden states [tokens, H], or [1, tokens, H] with `CallForm.leading`."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [tokens, H] or [1, tokens, H], cu_seqlens [sequences + 1], and its other arguments;
        returns what the original returns."""
        found = self._divided(hidden_states, args, kwargs)
        if found is None:
            return self._original_class.forward(self, hidden_states, *args, **kwargs)
        check_inference(self, hidden_states)
        sequences, batch, inputs = found
        output = bound_encoder_layer(batch, inputs, self._bound or self._bind())
        return self._signature.returned(sequences.rows(output).view(hidden_states.shape), None)

    def accepts(self, hidden_states: Tensor, **arguments: Any) -> bool:
        return self._divided(hidden_states, (), arguments) is not None

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        hidden_states, *rest = args or (kwargs.get("hidden_states"),)
        others = {name: value for name, value in kwargs.items() if name != "hidden_states" or args}
        if not isinstance(hidden_states, Tensor) or self._divided(hidden_states, tuple(rest), others) is None:
            return None
        return Reference((hidden_states, *rest), others)

    def _divided(
        self, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequences, Tensor, EncoderInputs] | None:
        """Return the sequences, their hidden states as a batch, and the op's other inputs, or None if the op does not support
        the call."""
        arguments = dict(zip(self._signature.names, args, strict=False)) | kwargs
        ends = arguments.pop(SEQUENCES, None)
        if self._signature.form.leading and hidden_states.dim() == 3 and len(hidden_states) == 1:
            hidden_states = hidden_states[0]
        if not isinstance(ends, Tensor) or hidden_states.dim() != 2 or is_tracing():
            return None
        if ends.dim() != 1 or len(ends) < 2 or not accepts_rows(self, len(hidden_states)):
            return None
        if any(arguments.get(name) is not None for name in (MASK, BIAS)):  # of all tokens, not of a batch
            return None
        sequences = remember(ends, "sequences", lambda: Sequences.of(ends), by_value=True)
        lengths = sequences.lengths
        if not lengths or int(ends[0]) or min(lengths) < 0 or sum(lengths) != len(hidden_states):
            return None
        if len(lengths) * max(lengths) > _MOST_PADDED * len(hidden_states):
            return None
        tables = arguments.get(ROTARY)
        if isinstance(tables, tuple) and all(
            isinstance(table, Tensor) and table.dim() == 2 for table in tables
        ):
            arguments[ROTARY] = tuple(self._batch_of(table, sequences) for table in tables)
        batch = sequences.batch(hidden_states)
        found = self._inputs(batch, (), arguments)
        return None if found is None else (sequences, batch, found[0]._replace(padding=sequences.padding))

    @staticmethod
    def _batch_of(table: Tensor, sequences: Sequences) -> Tensor:
        """Return a table of all tokens as a batch. All layers get the same tables."""
        if len(table) != sum(sequences.lengths):
            return table  # which `_inputs` refuses
        return remember(table, ("sequences", sequences.lengths), lambda: sequences.batch(table))
