"""Calls of a model that append tokens to one text, and take back those that turned out wrong."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer

from hf_cpu_accel import extension
from hf_cpu_accel.generate.replay.steps import DecodeSteps
from hf_cpu_accel.generate.speculation.draft import SIZES

_MOST_ROWS = SIZES[-1] + 1  # calls with more tokens are too rare to be captured

_ATEN = torch.ops.aten
# Their sums may have another order where there are more rows.
_MATRIX_PRODUCTS = frozenset(
    (_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv, _ATEN.dot, _ATEN.linear, _ATEN.convolution)
)  # fmt: skip
_ATTENTION = "scaled_dot_product"
_OURS = torch.ops.hf_cpu_accel
# The ops of this package whose rows do not depend on one another, up to _MOST_ROWS of them.
_BY_ROW = frozenset((_OURS.decoder_layers, _OURS.linear, _OURS.rms_norm, _OURS.have_values))


class Inputs(Protocol):
    """The inputs of a model for new tokens of a text; see `StepInputs`, which has the same methods."""

    cache: Any

    def after(self, ids: Tensor, new_tokens: int = 1) -> dict[str, Any]: ...

    def go_on_with(self, outputs: Any) -> None: ...


class TextCalls:
    """A model and its cache of one text.

    Args:
        inputs: of the calls.
        length: tokens of the text, which are all in the cache.
        to_come: how many more there will be at most, or None.
    """

    def __init__(self, model: Any, inputs: Inputs, length: int, to_come: int | None) -> None:
        self.inputs = inputs
        self._model, self._to_come = model, to_come
        self._steps: dict[int, DecodeSteps] = {}
        self._cached = length  # tokens in the cache
        cache = inputs.cache
        self._not_in_text = int(cache.get_seq_length()) - length  # tokens in the cache: embeddings
        cache.activate_past_recording()

    def logits(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Append the last columns of `ids`, int64 [1, tokens], and return their logits [new_tokens, vocabulary]."""
        length = ids.shape[1]
        inputs = self.inputs.after(ids, new_tokens)
        if new_tokens > _MOST_ROWS:
            outputs = self._model(**inputs, return_dict=True)
        else:
            outputs = self._steps_of(new_tokens)(inputs, length - new_tokens)
        self.inputs.go_on_with(outputs)
        self._cached = length
        logits: Tensor = outputs.logits[0, -new_tokens:]
        return logits

    def keep(self, length: int) -> None:
        """Take back all tokens after the first `length`; those can no longer be taken back."""
        for layer in self.inputs.cache.layers:  # after an interrupt they may differ
            if not isinstance(layer, DummyLayer):
                layer.crop(min(0, length + self._not_in_text - int(layer.get_seq_length())))
        self._cached = length

    def is_settled(self, new_tokens: int) -> bool:
        """Return whether the next call with so many tokens takes about as long as all later ones."""
        return new_tokens in self._steps and self._steps[new_tokens].is_settled

    def is_exact(self) -> bool:
        """Return whether a token is known to get the same logits, bit for bit, together with others as alone: its steps are
        replayed, and only some kernels of this package compute sums of products in them."""
        if not extension.status().loaded:  # torch's products are not alike for any number of rows
            return False
        ops = self._steps[1].replayed_ops() if 1 in self._steps else frozenset()
        return bool(ops) and all(map(_is_by_row, ops))

    def _steps_of(self, new_tokens: int) -> DecodeSteps:
        if new_tokens not in self._steps:
            self._steps[new_tokens] = DecodeSteps(
                self._model, self.inputs.cache, self._cached + 1, self._to_come, new_tokens
            )
        return self._steps[new_tokens]


def _is_by_row(op: Any) -> bool:
    """Return whether an op computes each token in the same way for any number of tokens."""
    if str(op).startswith(str(_OURS.linear).partition(".")[0]):
        return op in _BY_ROW
    return op not in _MATRIX_PRODUCTS and _ATTENTION not in str(op)
