"""What is measured on examples: how near the outputs of a model are to those that it had before, as one number up to 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.accuracy.calls import Call
from hf_cpu_accel.accuracy.candidates import generates
from hf_cpu_accel.measure.agreement import compare, float_tensors
from hf_cpu_accel.measure.dtype_choice import COSINE, PERPLEXITY

_ROWS = 128  # of logits at a time: there are as many numbers in each as there are words
_EMBEDDING = "sentence_embedding"
_IGNORED = -100  # of labels, as transformers has it
# Not answers: inputs of a SentenceTransformer, which it returns with its results, and losses of labels that came along.
_NO_ANSWERS = frozenset({"loss", "past_key_values", "hidden_states", "attentions", "token_embeddings"})


class Budget(Protocol):
    """The outputs of a model as it was, and how near others are to them.

    Attributes:
        measure: what the number is, a `Choice.measure`.
    """

    measure: str

    def measured(self, model: nn.Module, enough: float) -> float:
        """Of `model` in its present state; where that is less than `enough` it need not be exact."""


def budget_of(model: nn.Module, calls: Sequence[Call]) -> Budget:
    """For `model`, which is as it was made: the loss if it is a causal language model, else the cosines of its outputs."""
    if generates(model) and all(isinstance(call.kwargs.get("input_ids"), Tensor) for call in calls):
        output = calls[0].first(model)
        logits = getattr(output, "logits", None)
        ids = calls[0].kwargs["input_ids"]
        if isinstance(logits, Tensor) and logits.shape[:2] == ids.shape:
            return PerplexityBudget(model, calls)
    return CosineBudget(model, calls)


class CosineBudget:
    """The least cosine of a row (a vector along the last dimension) of any output to the same row before.

    What stands at padding does not count. Outputs with one number in a row have no direction: those of all calls are one row.
    """

    measure = COSINE

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._before = [_answers(call.first(model), call.mask) for call in calls]

    def measured(self, model: nn.Module, enough: float) -> float:
        least = 1.0
        singles: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for call, before in zip(self._calls, self._before, strict=True):
            now = _answers(call(model), call.mask)
            if [tensor.shape for tensor in now] != [tensor.shape for tensor in before]:
                return -1.0
            for place, pair in enumerate(zip(now, before, strict=True)):
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
    """The perplexity before, of all next tokens of all calls together, divided by the present one."""

    measure = PERPLEXITY

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._before = self._loss(model, Call.first)

    def measured(self, model: nn.Module, enough: float) -> float:
        loss = self._loss(model, Call.__call__)
        return math.exp(self._before - loss) if math.isfinite(loss) else 0.0

    def _loss(self, model: nn.Module, run: Callable[[Call, nn.Module], Any]) -> float:
        """Mean over the tokens.

        Raises:
            ValueError: there is no next token in any of the examples.
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
                "examples: there is no next token in any of them: expected texts of two tokens at least"
            )
        return total / count


def _targets(call: Call) -> Tensor:
    """[B, L - 1]: the next tokens, those that do not count as `_IGNORED`."""
    targets = call.kwargs.get("labels", call.kwargs["input_ids"])[:, 1:]
    return targets if call.mask is None else targets.masked_fill(call.mask[:, 1:] == 0, _IGNORED)


def _answers(output: Any, mask: Tensor | None) -> list[Tensor]:
    """The floating point tensors of an output; zeros at padding."""
    if isinstance(output, Mapping):
        only = {name: value for name, value in output.items() if name not in _NO_ANSWERS}
        output = {_EMBEDDING: only[_EMBEDDING]} if _EMBEDDING in only else only
    found = float_tensors(output)
    if mask is None:
        return found
    return [_without_padding(tensor, mask) if tensor.shape[:2] == mask.shape else tensor for tensor in found]


def _without_padding(tensor: Tensor, mask: Tensor) -> Tensor:
    shape = mask.shape + (1,) * (tensor.dim() - 2)
    return tensor.masked_fill(mask.reshape(shape) == 0, 0.0)


def _cosine(now: Tensor, before: Tensor) -> float:
    """The least one of a row. What was not finite before (scores that a model hides) need not be compared."""
    finite = torch.isfinite(before)
    if not bool(finite.all()):
        now, before = now.masked_fill(~finite, 0.0), before.masked_fill(~finite, 0.0)
    return compare([now], [before]).worst_cosine
