"""embedding_norm: the embeddings of a transformer encoder in one pass: words, token types and positions, added and normalized.

    layer_norm(words[ids] + types[type_ids] + positions[position_ids]) * weight + bias      Devlin et al. 2018, arXiv:1810.04805

One op instead of seven, because each of the seven takes less time than its dispatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops.norm import layer_norm_reference
from hf_cpu_accel.ops.registry import by_name, declare


def embedding_norm(
    ids: Tensor,
    words: Tensor,
    *,
    type_ids: Tensor | None = None,
    types: Tensor | None = None,
    position_ids: Tensor | None = None,
    positions: Tensor | None = None,
    first_position: int = 0,
    padding_id: int | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float,
) -> Tensor:
    """Compute the LayerNorm of the sum of one row per token of each table.

    Args:
        ids: [B, L] int64 or int32, any strides: rows of `words`.
        words: [V, C] float32 or bfloat16.
        type_ids: [B or 1, L] int64 or int32: rows of `types`; None for row 0 everywhere.
        types: [T, C] in the dtype of `words`, or None for no such table.
        position_ids: [B or 1, L] int64 or int32: rows of `positions`. None numbers the tokens of each row of `ids`
            first_position, first_position + 1, ... With a `padding_id`, tokens equal to it are skipped and have position
            first_position - 1 (the numbering of fairseq and RoBERTa).
        positions: [P, C] in the dtype of `words`, or None for no such table.
        first_position: the position of the first token where position_ids is None.
        padding_id: the id of padding where position_ids is None, or None.
        weight, bias: [C] float32 or bfloat16, or None for ones and zeros.
        eps: added to the variance.

    Returns:
        [B, L, C] contiguous, dtype of `words`. Sum and norm are computed in float32.

    Raises:
        IndexError: an index is out of range of its table.
        ValueError: the shapes do not fit.
    """
    _check(ids, words, type_ids, types, position_ids, positions)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != words.shape[1:]:
            raise ValueError(
                f"{name} of shape {tuple(vector.shape)}: must be ({words.shape[1]},), as wide as words"
            )
    return torch.ops.hf_cpu_accel.embedding_norm(
        ids, words, type_ids, types, position_ids, positions, first_position, padding_id, weight, bias, eps
    )


def _check(
    ids: Tensor,
    words: Tensor,
    type_ids: Tensor | None,
    types: Tensor | None,
    position_ids: Tensor | None,
    positions: Tensor | None,
) -> None:
    for name, matrix in (("ids", ids), ("words", words)):
        if matrix.dim() != 2:
            raise ValueError(f"{name} of shape {tuple(matrix.shape)}: must have two dimensions")
    for name, indices, table in (("type", type_ids, types), ("position", position_ids, positions)):
        if table is None and indices is not None:
            raise ValueError(f"{name}_ids without {name}s; pass the table {name}s too")
        if table is not None and table.shape[1:] != words.shape[1:]:
            raise ValueError(
                f"{name}s of shape {tuple(table.shape)}: must be [rows, {words.shape[1]}], as wide as words"
            )
        if indices is not None and indices.shape not in (ids.shape, (1, ids.shape[1])):
            raise ValueError(
                f"{name}_ids of shape {tuple(indices.shape)}: must be {tuple(ids.shape)} or (1, {ids.shape[1]})"
            )


def counted_positions(ids: Tensor, first_position: int, padding_id: int | None) -> Tensor:
    """Return the positions int64 [B or 1, L] of the tokens of `ids` [B, L] if position_ids is None; see `embedding_norm`."""
    if padding_id is None:
        return first_position + torch.arange(ids.shape[1])[None]
    counted = (ids != padding_id).long()
    return counted.cumsum(1) * counted + first_position - 1


_SCHEMA = (
    "embedding_norm(Tensor ids, Tensor words, Tensor? type_ids, Tensor? types, Tensor? position_ids, Tensor? positions, "
    "int first_position, int? padding_id, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


@by_name(_SCHEMA)
def embedding_norm_reference(given: Any) -> Tensor:
    """Compute the op in PyTorch."""
    ids, rows, positions = given.ids, given.type_ids, given.position_ids
    total = torch.nn.functional.embedding(ids, given.words).float()
    if given.types is not None:
        rows = torch.zeros_like(ids[:1]) if rows is None else rows
        total = total + torch.nn.functional.embedding(rows.expand(ids.shape), given.types).float()
    if given.positions is not None:
        if positions is None:
            positions = counted_positions(ids, given.first_position, given.padding_id)
        total = total + torch.nn.functional.embedding(positions.expand(ids.shape), given.positions).float()
    return layer_norm_reference(total, given.weight, given.bias, given.eps).to(given.words.dtype)


declare(
    _SCHEMA,
    fake=lambda ids, words, *_: words.new_empty((*ids.shape, words.shape[1])),
    reference=embedding_norm_reference,
)
