"""Attention written out, on graphs of a few nodes: spellings that become one op, and what must be left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.conftest import only_graph
from tests.compiler.passes.test_attention import with_heads

pytestmark = pytest.mark.usefixtures("no_codegen")


def softmax_of(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def inputs() -> list[Tensor]:
    return [torch.randn(2, length, 64) for length in (5, 7, 7)]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v, b: torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(16), -1) @ v,
        lambda m, q, k, v, b: torch.matmul(softmax_of(torch.matmul(q, k.transpose(2, 3)) * 0.3 + b), v),
        lambda m, q, k, v, b: torch.matmul(
            F.softmax((q * 0.5) @ (k * 0.25).transpose(-2, -1) + b, dim=-1), v
        ),
    ],
)
def test_spellings_of_attention(function: Callable[..., Tensor], found: Any) -> None:
    assert found(with_heads(function), *inputs(), torch.randn(2, 1, 5, 7)) == {"attention": 1}
    assert only_graph().rewrites["handwritten_attention"] == 1
    assert not {"aten.matmul.default", "aten.bmm.default"} & set(only_graph().rest)


def _probabilities_that_others_read(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probabilities = torch.softmax(q @ k.transpose(-1, -2), -1)
    return probabilities @ v + probabilities.sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v: torch.softmax(q @ k.transpose(-1, -2), -2) @ v,  # over the queries
        lambda m, q, k, v: torch.sigmoid(q @ k.transpose(-1, -2)) @ v,
        lambda m, q, k, v: torch.softmax(torch.tanh(q @ k.transpose(-1, -2)), -1) @ v,
        _probabilities_that_others_read,
    ],
)
def test_what_only_looks_like_attention_stays(function: Callable[..., Tensor], found: Any) -> None:
    assert found(with_heads(function), *inputs()) == {}
    assert only_graph().rewrites["handwritten_attention"] == 0
