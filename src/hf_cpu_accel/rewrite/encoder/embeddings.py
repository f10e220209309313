"""Embeddings of transformer encoders as one op: words, token types and positions are looked up, added and normalized.

The tables and their indices are matched from a trace of one forward, not from the class or the names of its parts. The match is
then verified: the op must agree with the module for ids with and without padding, for the longest sequence, and with and without
token types and positions as arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, Reference, empty
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.core.context import WEIGHT_DTYPES, Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.rewrite.encoder.embeddings_match import (
    IDS,
    POSITIONS,
    TYPES,
    EmbeddingsMatch,
    match_embeddings,
    tables_of,
)
from hf_cpu_accel.rewrite.norm.match import identify_norm
from hf_cpu_accel.tolerance import EMBEDDINGS

STRUCTURE = "embeddings"

_EMBEDDING_NORM = torch.ops.hf_cpu_accel.embedding_norm.default

_BATCH, _LENGTH = 2, 7


class FusedEmbeddings(FusedModuleMixin):
    """Mixed into the module's own class by `fuse`: children, hooks and attributes are those of the original.

    The tables are read in every call, since they may be resized while the model is accelerated. Cases that the op does not
    support (inputs_embeds, a cache, dropout, gradients, hooks on a table, another module in place of one, ids out of range) run
    the class's own forward, which also has its own error messages.
    """

    _reading: EmbeddingsMatch
    _hooks_inside: tuple[dict[int, Any], ...]
    _dropouts: tuple[nn.Module, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings [B, L, C] of input_ids [B, L], and token_type_ids and position_ids [B or 1, L] if the original
        takes them."""
        given = {**dict(zip(self._reading.inputs, args, strict=False)), **kwargs}
        if len(given) == len(args) + len(kwargs) and self._is_ordinary():
            ids, type_ids = given.pop(IDS, None), given.pop(TYPES, None)
            position_ids = given.pop(POSITIONS, None)
            if all(value is None or (type(value) is int and value == 0) for value in given.values()):
                try:
                    return look_up(self._reading, ids, type_ids, position_ids)
                except (IndexError, KeyError, RuntimeError):
                    pass  # ids that are None, out of range or of another shape; parametrized tables
        return self._original_class.forward(self, *args, **kwargs)

    def reference_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference | None:
        return Reference(args, kwargs)

    def _is_ordinary(self) -> bool:
        """Return whether the modules inside are unchanged, without hooks, and not in training."""
        if any(self._hooks_inside) or self.is_edited:
            return False
        if self.training or any(dropout.training for dropout in self._dropouts):
            return False
        return not (torch.is_grad_enabled() and self._reading.is_trained())


def look_up(
    matched: EmbeddingsMatch, ids: Tensor, type_ids: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Run the op on the current tables.

    Raises:
        IndexError, RuntimeError: the op rejects its arguments.
        KeyError: a table is no longer a plain parameter.
    """
    types, positions, norm = matched.types, matched.positions, matched.norm._parameters
    return _EMBEDDING_NORM(
        ids,
        matched.words._parameters["weight"],
        type_ids,
        None if types is None else types._parameters["weight"],
        position_ids,
        None if positions is None else positions._parameters["weight"],
        matched.first_position,
        matched.padding_id,
        norm["weight"],
        norm["bias"],
        matched.eps,
    )


def fuse(module: nn.Module, matched: EmbeddingsMatch) -> nn.Module:
    """Return `module` with the fused forward; the original is not changed."""
    fused = empty(FusedEmbeddings, type(module))
    # Dictionaries are shared on purpose: a table that is replaced or resized on either is so on both.
    fused.__dict__.update(vars(module))
    children = list(module.children())
    fused.__dict__.update(
        _reading=matched,
        _hooks_inside=tuple(
            hooks for child in children for hooks in (child._forward_hooks, child._forward_pre_hooks)
        ),
        _dropouts=tuple(child for child in children if isinstance(child, nn.Dropout)),
    )
    return fused


class EmbeddingsRule:
    """Embeddings like BERT's: up to three tables of one width, and a norm of the sum of their rows."""

    name = "embeddings"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if not context.tree.slots[id(module)] or not _may_be_embeddings(module):
            return None
        if any(context.skipped(f"{path}.{name}" if name else path) for name, _ in module.named_modules()):
            return None
        matched = match_embeddings(module)
        return None if matched is None or not _is_verified(module, matched) else Match(module, path, matched)

    def apply(self, match: Match, context: Context) -> Outcome:
        context.swap(match.module, fuse(match.module, match.data))
        item = PlanItem(match.path, STRUCTURE, "embedding_norm", "float32", packed_bytes=0, reason=None)
        return Outcome((item,), tuple(match.module.modules()))


def _may_be_embeddings(module: nn.Module) -> bool:
    """Return whether the module has one to three tables of equal width and dtype, a layer norm of that width, optionally
    dropout, and no parameters of its own."""
    if "forward" in vars(module) or module._compiled_call_impl is not None or module._parameters:
        return False
    tables = tables_of(module)
    others = [child for child in module.children() if type(child) is not nn.Embedding]
    norms = [child for child in others if not isinstance(child, nn.Dropout | nn.Identity)]
    if not 1 <= len(tables) <= 3 or len(norms) != 1 or not all(map(is_plain, module.children())):
        return False
    kinds = {(table.embedding_dim, table.weight.dtype) for table in tables}
    if len(kinds) != 1 or any(table.max_norm is not None for table in tables):
        return False
    width, dtype = kinds.pop()
    spec = identify_norm(norms[0])
    return (
        spec is not None
        and spec.kind == "layer_norm"
        and dtype in WEIGHT_DTYPES
        and all(p.shape == (width,) and p.dtype in WEIGHT_DTYPES for p in norms[0].parameters())
    )


def _is_verified(module: nn.Module, matched: EmbeddingsMatch) -> bool:
    """Return whether the op agrees with `module` in all forms of calls."""
    tolerance = EMBEDDINGS.of(matched.words.weight.dtype)
    with torch.no_grad():
        for inputs in _calls(matched):
            expected = call_foreign(module.forward, **inputs)
            if isinstance(expected, Refusal):
                return False
            given = look_up(matched, inputs[IDS], inputs.get(TYPES), inputs.get(POSITIONS))
            if not compare(given, expected).within(tolerance):
                return False
    return True


def _calls(matched: EmbeddingsMatch) -> Iterator[dict[str, Tensor]]:
    """Yield inputs that show every part of the match: the longest sequence (position ids may come from a buffer), and all
    combinations of optional inputs on a short batch."""
    generator = torch.Generator().manual_seed(0)

    def rows(table: nn.Embedding, batch: int, length: int) -> Tensor:
        return torch.randint(table.num_embeddings, (batch, length), generator=generator)

    longest = _LENGTH
    if matched.positions is not None:
        longest = matched.positions.num_embeddings - matched.first_position
    yield {IDS: rows(matched.words, 1, longest)}
    ids = rows(matched.words, _BATCH, min(_LENGTH, longest))
    if matched.padding_id is not None:
        ids[0, 1], ids[1, 2:] = matched.padding_id, matched.padding_id
    optional = {TYPES: matched.types, POSITIONS: matched.positions}
    for names in ((), (TYPES,), (POSITIONS,), (TYPES, POSITIONS)):
        for batch in (1, _BATCH) if names else (1,):
            tables = {name: optional[name] for name in names}
            given = {
                name: rows(table, batch, ids.shape[1]) for name, table in tables.items() if table is not None
            }
            yield {IDS: ids, **given}
