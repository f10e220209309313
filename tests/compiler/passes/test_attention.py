"""Spellings of attention that the pass knows, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def heads(x: Tensor) -> Tensor:
    """[B, L, 64] -> [B, 4, L, 16]. Inside of the model, so that the number of heads is no symbol."""
    return x.unflatten(-1, (4, 16)).transpose(1, 2)


def with_heads(function: Callable[..., Tensor]) -> Calls:
    return Calls(lambda m, q, k, v, *rest: function(m, heads(q), heads(k), heads(v), *rest))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v, b: F.scaled_dot_product_attention(q, k, v, b),
        lambda m, q, k, v, b: F.scaled_dot_product_attention(q, k, v, scale=0.7),
    ],
)
def test_spellings_of_attention(function: Callable[..., Tensor], found: Any) -> None:
    bias = torch.randn(2, 1, 5, 7)
    query, key, value = (torch.randn(2, length, 64) for length in (5, 7, 7))
    assert found(with_heads(function), query, key, value, bias) == {"attention": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),  # from the first key on
    ],
)
def test_what_only_looks_like_our_attention_stays(function: Callable[..., Tensor], found: Any) -> None:
    query, key, value = (torch.randn(2, length, 64) for length in (5, 7, 7))
    assert found(with_heads(function), query, key, value) == {}


def test_causal_attention_over_all_keys(found: Any) -> None:
    module = with_heads(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert found(module, *torch.randn(3, 2, 5, 64)) == {"attention": 1}


def masked(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention under a mask that is computed the way transformers does."""

    def function(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in x.chunk(3, dim=-1))
        batch, _, length, _ = q.shape
        positions = torch.arange(length)
        rows, queries, keys = (
            torch.arange(batch)[:, None, None, None],
            positions[None, None, :, None],
            positions[None, None, None],
        )
        mask = (rule(queries, keys) & padding.bool()[rows, keys]).expand(batch, -1, length, length)
        return F.scaled_dot_product_attention(q, k, v, mask)

    return function


@pytest.mark.parametrize(
    ("rule", "is_read"),
    [
        (lambda queries, keys: keys <= queries, True),
        (lambda queries, keys: queries >= 0, True),
        (lambda queries, keys: keys < queries + 3, False),
        (lambda queries, keys: queries <= keys, False),
        (lambda queries, keys: (keys <= queries) & (keys > queries - 3), False),
    ],
)
def test_masks_are_not_made_where_they_say_causality_and_padding(
    rule: Any, is_read: bool, found: Any
) -> None:
    padding = torch.ones(2, 6, dtype=torch.int64)
    padding[1, 5:] = 0
    module = Calls(masked(rule))
    assert found(module, torch.randn(2, 6, 192), padding) == {"attention": 1}
    assert ("aten.index.Tensor" not in only_graph().rest) == is_read


def test_dropout_in_training_is_not_lost(compiled: Callable[..., Any]) -> None:
    module = Calls(lambda m, x: F.dropout(m.up(x), 0.5, True), up=nn.Linear(32, 64))
    with torch.no_grad():
        output = compiled(module)(torch.randn(3, 5, 32))
    assert (output == 0).float().mean() > 0.2
