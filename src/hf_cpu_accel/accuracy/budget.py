"""Measure the accuracy on examples: one number up to 1 for the agreement of outputs with those of the original model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.accuracy.calls import Call
from hf_cpu_accel.accuracy.candidates import generates
from hf_cpu_accel.check import compare, float_tensors
from hf_cpu_accel.measure.dtype_choice import COSINE, PERPLEXITY

_ROWS = 128  # rows of logits per step, because each row is as long as the vocabulary
_EMBEDDING = "sentence_embedding"
_IGNORED = -100  # the ignored label of transformers
# Outputs that are not compared: inputs of a SentenceTransformer, which it returns with its results, losses and caches.
_NOT_COMPARED = frozenset({"loss", "past_key_values", "hidden_states", "attentions", "token_embeddings"})


class Budget(Protocol):
    """The outputs of an original model, with which later outputs are compared.

    Attributes:
        measure: the kind of the number, a `Choice.measure`.
    """

    measure: str

    def measured(self, model: nn.Module, enough: float) -> float:
        """Return the accuracy of `model` in its current state; a number below `enough` need not be exact."""


def budget_of(model: nn.Module, calls: Sequence[Call]) -> Budget:
    """Return the budget of an original model: the perplexity of causal language models, or else the cosine of the outputs."""
    if generates(model) and all(isinstance(call.kwargs.get("input_ids"), Tensor) for call in calls):
        output = calls[0].first(model)
        logits = getattr(output, "logits", None)
        ids = calls[0].kwargs["input_ids"]
        if isinstance(logits, Tensor) and logits.shape[:2] == ids.shape:
            return PerplexityBudget(model, calls)
    return CosineBudget(model, calls)


class CosineBudget:
    """The lowest cosine of a row (a vector along the last dimension) of any output to the same row of the original model.

    Padding is ignored. Outputs with one number per row have no direction, so those of all calls form one row.
    """

    measure = COSINE

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._before = [_compared_outputs(call.first(model), call.mask) for call in calls]

    def measured(self, model: nn.Module, enough: float) -> float:
        """Return the lowest cosine; -1 if the shapes of outputs differ."""
        least = 1.0
        singles: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for call, before in zip(self._calls, self._before, strict=True):
            comparison = compare(_compared_outputs(call(model), call.mask), before)
            if comparison.mismatch is not None:
                return -1.0
            for place, pair in enumerate(comparison.pairs):
                if pair[1].dim() == 0 or pair[1].shape[-1] == 1:
                    singles.setdefault(place, []).append(pair)
                else:
                    least = min(least, _cosine(*pair))
            if least < enough:
                return least
        for pairs in singles.values():
            now_, before_ = (
                torch.cat([t.float().flatten() for t in side]) for side in zip(*pairs, strict=True)
            )
            least = min(least, _cosine(now_[None], before_[None]))
        return least


class PerplexityBudget:
    """The perplexity of the original model over all next tokens of all calls, divided by the current one."""

    measure = PERPLEXITY

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._before = self._loss(model, Call.first)

    def measured(self, model: nn.Module, enough: float) -> float:
        """Return the quotient of the perplexities; 0 if the loss is not finite."""
        loss = self._loss(model, Call.__call__)
        return math.exp(self._before - loss) if math.isfinite(loss) else 0.0

    def _loss(self, model: nn.Module, run: Callable[[Call, nn.Module], Any]) -> float:
        """Return the mean loss over the tokens.

        Raises:
            ValueError: no example has a next token.
        """
        total, count = 0.0, 0
        for call in self._calls:
            logits, targets = run(call, model).logits[:, :-1].flatten(0, 1), _targets(call).flatten()
            for start in range(0, len(logits), _ROWS):
                rows = slice(start, start + _ROWS)
                losses = F.cross_entropy(
                    logits[rows].float(), targets[rows], ignore_index=_IGNORED, reduction="sum"
                )
                total += losses.double().item()
            count += int((targets != _IGNORED).sum())
        if count == 0:
            raise ValueError(
                "examples have no next token to predict: expected texts with at least two tokens"
            )
        return total / count


def _targets(call: Call) -> Tensor:
    """Return the next tokens, int64 [B, L - 1], with `_IGNORED` for padding."""
    targets = call.kwargs.get("labels", call.kwargs["input_ids"])[:, 1:]
    return targets if call.mask is None else targets.masked_fill(call.mask[:, 1:] == 0, _IGNORED)


def _compared_outputs(output: Any, mask: Tensor | None) -> list[Tensor]:
    """Return the float tensors of an output to compare, with zeros at padding."""
    if isinstance(output, Mapping):
        compared = {name: value for name, value in output.items() if name not in _NOT_COMPARED}
        output = {_EMBEDDING: compared[_EMBEDDING]} if _EMBEDDING in compared else compared
    tensors = float_tensors(output)
    if mask is None:
        return tensors
    return [
        _without_padding(tensor, mask) if tensor.shape[:2] == mask.shape else tensor for tensor in tensors
    ]


def _without_padding(tensor: Tensor, mask: Tensor) -> Tensor:
    shape = mask.shape + (1,) * (tensor.dim() - 2)
    return tensor.masked_fill(mask.reshape(shape) == 0, 0.0)


def _cosine(now: Tensor, before: Tensor) -> float:
    """Return the lowest cosine of a row. Values that are not finite in the original, such as masked scores, are ignored."""
    return compare(now, before).where_finite().agreement.worst_cosine
