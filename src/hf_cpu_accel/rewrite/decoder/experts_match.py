"""Which parameters route tokens to experts, and by which formula: told by the numbers of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel.rewrite.core.tolerance import TRACED
from hf_cpu_accel.rewrite.core.verify import row_error
from hf_cpu_accel.rewrite.decoder.experts_parts import RouterParts
from hf_cpu_accel.rewrite.decoder.trace import ExpertsCall

_SCORINGS: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")


def read_router(call: ExpertsCall, tensors: Mapping[str, Tensor]) -> RouterParts | None:
    """The router that sent the tokens of `call` to their experts, made of some of `tensors`: parameters and buffers by path."""
    experts, features = call.experts.weights.experts, call.input.shape[-1]
    x, index, weights = (part.flatten(0, 1) for part in (call.input, call.index, call.weights))
    top_k = index.shape[1]
    chosen = index.sort(dim=-1).values
    matrices = {path: t for path, t in tensors.items() if t.shape == (experts, features)}
    for weight, bias, choice_bias in _places(matrices, tensors, experts):
        logits = F.linear(x, matrices[weight].float(), None if bias is None else tensors[bias].float())
        for scoring in _SCORINGS:
            scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()
            order = scores if choice_bias is None else scores + tensors[choice_bias].float()
            if not torch.equal(order.topk(top_k).indices.sort(dim=-1).values, chosen):
                continue
            for renormalise, scale in _weights(scores.gather(-1, index), weights):
                return RouterParts(weight, bias, top_k, scoring, choice_bias, renormalise, scale)
    return None


def _places(
    matrices: Mapping[str, Tensor], tensors: Mapping[str, Tensor], experts: int
) -> Iterator[tuple[str, str | None, str | None]]:
    """Where weight, bias and the bias of the choice may be. The biases are beside the weight, and each has a purpose."""
    for weight in matrices:
        module = weight.rpartition(".")[0]
        beside = [
            path for path, t in tensors.items() if t.shape == (experts,) and path.rpartition(".")[0] == module
        ]
        for bias, choice_bias in product((None, *beside), (None, *beside)):
            if {bias, choice_bias} - {None} == set(beside) and (bias is None or bias != choice_bias):
                yield weight, bias, choice_bias


def _weights(scores: Tensor, weights: Tensor) -> Iterator[tuple[bool, float]]:
    """The (renormalise, scale) that make `weights` of the chosen experts' `scores`, [T, k] both."""
    for renormalise in (False, True):
        made = scores / scores.sum(dim=-1, keepdim=True) if renormalise else scores
        scale = ((weights * made).sum() / made.square().sum()).item()
        scale = 1.0 if abs(scale - 1) < TRACED.float32 else scale
        if row_error(made * scale, weights) <= TRACED.float32:
            yield renormalise, scale
