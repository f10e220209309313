"""The pass that adds up messages of graph networks: every spelling it knows, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def gathered(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    return x.index_select(0, edges[0])


def added(messages: Tensor, edges: Tensor, rows: int) -> Tensor:
    index = edges[1].view(-1, 1).expand_as(messages)
    return messages.new_zeros(rows, messages.shape[1]).scatter_add_(0, index, messages)


def mean(messages: Tensor, edges: Tensor, rows: int) -> Tensor:
    count = messages.new_zeros(rows).scatter_add_(0, edges[1], messages.new_ones(len(messages))).clamp(1)
    total = added(messages, edges, rows)
    return total / count.view(-1, 1).expand_as(total)


MESSAGES: list[Callable[..., Tensor]] = [
    lambda m, x, edges, w: added(gathered(m, x, edges), edges, len(x)),
    lambda m, x, edges, w: added(w.view(-1, 1) * gathered(m, x, edges), edges, len(x)),
    lambda m, x, edges, w: added(gathered(m, x, edges) * w.unsqueeze(-1), edges, len(x)),
    lambda m, x, edges, w: torch.zeros(*x.shape).scatter_add(
        0, edges[1].unsqueeze(1).expand(-1, x.shape[1]), gathered(m, x, edges)
    ),
    lambda m, x, edges, w: mean(gathered(m, x, edges), edges, len(x)),
    lambda m, x, edges, w: mean(w.view(-1, 1) * gathered(m, x, edges), edges, len(x)),
]


def added_heads(m: Any, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    """Rows [4, 4], and a weight for each of the first."""
    weights = torch.stack([weight, weight * 2, weight.square(), weight + 1], dim=1)
    known = x * torch.ones(16)  # so that the number of features is no symbol
    messages = gathered(m, known.view(-1, 4, 4), edges) * weights.view(-1, 4, 1)
    index = edges[1].view(-1, 1, 1).expand_as(messages)
    return messages.new_zeros(len(x), 4, 4).scatter_add_(0, index, messages)


MESSAGES.append(added_heads)
EDGES = torch.tensor([[0, 1, 1, 4, 3, 5, 1], [2, 2, 0, 4, 5, 2, 2]])


@pytest.mark.parametrize("function", MESSAGES)
def test_spellings_of_message_passing(function: Callable[..., Tensor], found: Any) -> None:
    given = torch.randn(6, 16), EDGES, torch.rand(7)
    assert found(Calls(function), *given) == {"coo_to_csr": 1, "spmm_reduce": 1}
    assert not [name for name in only_graph().rest if "scatter" in name or "div" in name]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, edges, w: added(gathered(m, x, edges)[:, :4], edges, len(x)),  # narrow, and not whole
        lambda m, x, edges, w: added(gathered(m, x, edges) * 2, edges, len(x)),
        lambda m, x, edges, w: added(gathered(m, x.double(), edges), edges, len(x)),
        lambda m, x, edges, w: x.clone().scatter_add_(  # not onto zeros
            0, edges[1].view(-1, 1).expand(-1, 16), gathered(m, x, edges)
        ),
        lambda m, x, edges, w: added(gathered(m, x, edges), edges, len(x)).add_(1),  # written to afterwards
        lambda m, x, edges, w: x.t().index_select(1, edges[0]),
    ],
)
def test_sums_that_are_not_of_gathered_rows_stay(function: Callable[..., Tensor], found: Any) -> None:
    assert found(Calls(function), torch.randn(6, 16), EDGES, torch.rand(7)) == {}


def test_a_sum_is_kept_where_it_is_needed_besides_the_mean(found: Any) -> None:
    def function(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        count = x.new_zeros(len(x)).scatter_add_(0, edges[1], x.new_ones(edges.shape[1])).clamp(1)
        total = added(gathered(m, x, edges), edges, len(x))
        return total / count.view(-1, 1).expand_as(total) + total

    found(Calls(function), torch.randn(6, 16), EDGES)
    assert only_graph().rewrites["messages"] == 1
    assert only_graph().rest["aten.div.Tensor"] == 1


def test_edges_out_of_range_are_refused(compiled: Callable[..., Any]) -> None:
    fast = compiled(Calls(MESSAGES[0]))
    with torch.no_grad(), pytest.raises(RuntimeError):
        fast(torch.randn(6, 16), EDGES + 3, torch.rand(7))
