"""Match an embeddings module from the rows of the tables that one forward reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import parameter_names
from hf_cpu_accel.ops.embedding import counted_positions
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.trace import traced
from hf_cpu_accel.rewrite.norm.match import identify_norm

IDS, TYPES, POSITIONS = "input_ids", "token_type_ids", "position_ids"
# Parameters that callers leave at None or 0. Any other one (DeBERTa's mask) changes the output in every call.
_LEFT_OUT = ("inputs_embeds", "cache_length", "past_key_values_length")
_LOOKUP = torch.ops.aten.embedding.default
_BATCH, _LENGTH = 2, 7


@dataclass(frozen=True)
class EmbeddingsMatch:
    """The parts of an embeddings module.

    Attributes:
        words, types, positions: its tables; those of token types and positions may be missing.
        norm, eps: its norm, and the number added to the variance.
        first_position, padding_id: how positions are counted; see `ops.embedding.embedding_norm`.
        inputs: names of the parameters of its forward, in their order.
    """

    words: nn.Embedding
    types: nn.Embedding | None
    positions: nn.Embedding | None
    norm: nn.Module
    eps: float
    first_position: int
    padding_id: int | None
    inputs: tuple[str, ...]

    def is_trained(self) -> bool:
        """Return whether a parameter requires a gradient."""
        parts = (self.words, self.types, self.positions, self.norm)
        parameters = (p for part in parts if part is not None for p in part._parameters.values())
        return any(p is not None and p.requires_grad for p in parameters)


def tables_of(module: nn.Module) -> list[nn.Embedding]:
    """Return the children that are plain lookup tables."""
    return [child for child in module.children() if type(child) is nn.Embedding]


@dataclass(frozen=True)
class _Role:
    """The input that indexes a table, and for positions how they are counted."""

    input: str
    first_position: int = 0
    padding_id: int | None = None


def match_embeddings(module: nn.Module) -> EmbeddingsMatch | None:
    """Return the parts of `module`, which consists of tables and one norm, from a trace, or None."""
    inputs = parameter_names(module.forward)
    if IDS not in inputs or not set(inputs) <= {IDS, TYPES, POSITIONS, *_LEFT_OUT}:
        return None
    padding_ids = _padding_ids(module)
    ids = _ids_with(padding_ids)
    looked_up: list[tuple[int, Tensor]] = []  # (address of a table, the rows that were asked for)

    def look_up(table: Tensor, rows: Tensor, *args: Any) -> Tensor:
        looked_up.append((table.data_ptr(), rows))
        return table.new_zeros((*rows.shape, table.shape[1]))  # the ids need not be in range

    with torch.no_grad(), traced(replacements={_LOOKUP: look_up}):
        if isinstance(call_foreign(module.forward, **{IDS: ids}), Refusal):
            return None
    by_weight = {table.weight.data_ptr(): table for table in tables_of(module)}
    if sorted(address for address, _ in looked_up) != sorted(by_weight):
        return None  # a table that is not used, or twice, or shared
    found: dict[str, tuple[nn.Embedding, _Role]] = {}
    for address, rows in looked_up:
        role = _role(rows, ids, padding_ids)
        if role is None or role.input in found or role.input not in inputs:
            return None
        found[role.input] = by_weight[address], role
    if IDS not in found:
        return None
    nothing = None, _Role(POSITIONS)
    types, (positions, counting) = found.get(TYPES, nothing)[0], found.get(POSITIONS, nothing)
    norms = ((child, identify_norm(child)) for child in module.children())
    norm, eps = next((child, spec.eps) for child, spec in norms if spec is not None)
    first_position, padding_id = counting.first_position, counting.padding_id
    return EmbeddingsMatch(found[IDS][0], types, positions, norm, eps, first_position, padding_id, inputs)


def _role(rows: Tensor, ids: Tensor, padding_ids: list[int]) -> _Role | None:
    """Return the role of a table whose `rows` were read for `ids`, or None."""
    if rows.dim() not in (1, 2) or rows.shape[-1] != _LENGTH:
        return None
    rows = rows.expand(ids.shape)
    if torch.equal(rows, ids):
        return _Role(IDS)
    if not rows.any():
        return _Role(TYPES)
    first = int(rows[0, 0])  # where `ids` has no padding
    for padding_id in (None, *padding_ids):
        if torch.equal(rows, counted_positions(ids, first, padding_id).expand(ids.shape)):
            return _Role(POSITIONS, first, padding_id)
    return None


def _padding_ids(module: nn.Module) -> list[int]:
    """Return the ids that may be padding for `module`, from itself or one of its tables."""
    held = [getattr(part, "padding_idx", None) for part in (module, *tables_of(module))]
    return sorted({value for value in held if isinstance(value, int)})


def _ids_with(padding_ids: list[int]) -> Tensor:
    """Return ids [2, 7] that contain all of `padding_ids`, in both rows, but not in the first place."""
    ids = torch.randint(1000, 2000, (_BATCH, _LENGTH), generator=torch.Generator().manual_seed(0))
    for number, padding_id in enumerate(padding_ids):
        ids[0, 1 + number], ids[1, _LENGTH - 1 - number] = padding_id, padding_id
    return ids
