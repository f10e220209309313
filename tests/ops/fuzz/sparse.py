"""The ops on graphs: raw calls of each; sparse/test_fuzz.py has more, of their Python functions."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from hf_cpu_accel.ops import graph_attention as attention
from hf_cpu_accel.ops import sparse_reference as reference
from hf_cpu_accel.ops.messages import reference as messages
from hf_cpu_accel.ops.messages.messages import AGGREGATES
from tests.ops.fuzz import draw
from tests.ops.fuzz.call import Call

# Those of sparse/test_fuzz.py.
FLOAT32, BFLOAT16 = 1e-4, 4e-2


class Graph:
    """A CSR of up to 60 rows and columns, some without edges."""

    def __init__(self, rng: random.Random) -> None:
        self.targets, self.sources = rng.randint(1, 60), rng.randint(1, 60)
        edges = rng.choice((0, 1, rng.randint(2, 200)))
        self.row = torch.randint(0, self.targets, (edges,))
        self.source = torch.randint(0, self.sources, (edges,))
        sorted_ = reference.coo_to_csr_reference(self.row, self.source, self.targets, self.sources, -1, True)
        self.rowptr, self.col, self.order = sorted_
        self.edges, self.heads = edges, rng.choice((1, 1, 2, 4))
        self.features = self.heads * rng.choice((1, 2, 7, 16, 17, 33))
        self.dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))

    def rows(self, rng: random.Random, count: int) -> Tensor:
        return draw.laid_out(rng, torch.randn(count, self.features).to(self.dtype))

    def call(self, op: str, arguments: list[Any], reference: Any) -> Call:
        return Call(op, arguments, reference, FLOAT32 if self.dtype is torch.float32 else BFLOAT16)


def sort(rng: random.Random) -> Call:
    g = Graph(rng)
    if rng.random() < 0.5:
        return g.call("csr_transpose", [g.rowptr, g.col, g.sources], reference.csr_transpose_reference)
    row, col = (x.int() if rng.random() < 2 else x for x in (g.row, g.source))
    if rng.random() < 0.5:
        row, col = row.long(), col.long()
    arguments = [row, col, g.targets, g.sources, rng.choice((-1, min(g.targets, g.sources))), True]
    return g.call("coo_to_csr", arguments, reference.coo_to_csr_reference)


def products(rng: random.Random) -> Call:
    g, reduce = Graph(rng), rng.choice(("sum", "mean", "min", "max"))
    x, nothing = g.rows(rng, g.sources), [None, None, None]
    if rng.random() < 0.3:
        a = g.rows(rng, g.targets)
        return g.call("sddmm", [g.rowptr, g.col, a, x, g.heads], reference.sddmm_reference)
    extreme = reduce in ("min", "max")
    value = (
        torch.randn(g.edges) if rng.random() < 0.5 and not (extreme and x.dtype is torch.bfloat16) else None
    )
    if extreme and x.dtype is torch.float32 and rng.random() < 0.5:
        arguments = [g.rowptr, g.col, value, x, reduce, *nothing]
        return g.call("spmm_extreme", arguments, reference.spmm_extreme_reference)
    addend = g.rows(rng, g.targets) if rng.random() < 0.3 else None
    bias = torch.randn(g.features) if rng.random() < 0.3 else None
    arguments = [g.rowptr, g.col, value, x, reduce, addend, 0.5, bias, *nothing]
    return g.call("spmm_reduce", arguments, reference.spmm_reduce_reference)


def extreme_backward(rng: random.Random) -> Call:
    g = Graph(rng)
    g.dtype = torch.float32
    x = g.rows(rng, g.sources)
    output, _ = reference.spmm_extreme_reference(g.rowptr, g.col, None, x, "max")
    turned = reference.csr_transpose_reference(g.rowptr, g.col, g.sources)
    arguments = [*turned[:2], None, x, output, g.rows(rng, g.targets)]
    return g.call("spmm_extreme_backward", arguments, reference.spmm_extreme_backward_reference)


def softmax(rng: random.Random) -> Call:
    g = Graph(rng)
    g.dtype = torch.float32
    scores = torch.randn(g.edges, g.heads)
    if rng.random() < 0.5:
        return g.call("segment_softmax", [g.rowptr, scores], reference.segment_softmax_reference)
    weights = reference.segment_softmax_reference(g.rowptr, scores)
    arguments = [g.rowptr, weights, torch.randn(g.edges, g.heads)]
    return g.call("segment_softmax_backward", arguments, reference.segment_softmax_backward_reference)


def graph_attention(rng: random.Random) -> Call:
    g = Graph(rng)
    x, query = g.rows(rng, g.sources), g.rows(rng, g.targets)
    scores = torch.randn(g.sources, g.heads), torch.randn(g.targets, g.heads)
    weight = torch.randn(g.heads, g.features // g.heads)
    op, theirs, arguments = rng.choice(
        (
            ("gat", attention.gat_reference, [x, *scores, 0.2]),
            ("gatv2", attention.gatv2_reference, [x, query, weight, 0.2]),
            (
                "dot_attention",
                attention.dot_attention_reference,
                [query, x, g.rows(rng, g.sources), g.heads, 0.3],
            ),
        )
    )
    return g.call(op, [g.rowptr, g.col, *arguments], theirs)


def message_passing(rng: random.Random) -> Call:
    g = Graph(rng)
    target = g.rows(rng, g.targets) if rng.random() < 0.5 else None
    edge = g.rows(rng, g.edges + rng.randint(0, 3)) if rng.random() < 0.5 else None
    order = torch.randperm(len(edge))[: g.edges].int() if edge is not None and rng.random() < 0.5 else None
    parts = [g.rowptr, g.col, order, g.rows(rng, g.sources), target, edge, rng.random() < 0.5]
    if rng.random() < 0.3:
        return g.call("edge_messages", [*parts, None, None, None], messages.edge_messages_reference)
    reduces = ",".join(rng.sample(AGGREGATES, rng.randint(1, 6)))
    arguments = [*parts, reduces, False, None, None, None]
    return g.call("message_reduce", arguments, messages.message_reduce_reference)


def message_gradients(rng: random.Random) -> Call:
    g = Graph(rng)
    g.dtype = torch.float32
    x, target = g.rows(rng, g.sources), g.rows(rng, g.targets) if rng.random() < 0.5 else None
    groups = ("base", "slope", "min", "max")
    names = sorted(rng.sample(groups, rng.randint(1, 4)), key=groups.index)
    width = sum(1 if name in ("base", "slope") else 2 for name in names)
    table, relu = torch.randn(g.targets, width * g.features), rng.random() < 0.5
    if rng.random() < 0.5:
        turned = reference.csr_transpose_reference(g.rowptr, g.col, g.sources)
        arguments = [*turned[:2], x, target, relu, table, ",".join(names)]
        return g.call("message_grad_sources", arguments, messages.message_grad_sources_reference)
    edge = g.rows(rng, g.edges) if rng.random() < 0.7 else None
    asked = [rng.random() < 0.7, edge is not None and rng.random() < 0.7]
    arguments = [g.rowptr, g.col, None, x, target, edge, relu, table, ",".join(names), *asked]
    return g.call("message_grad_edges", arguments, messages.message_grad_edges_reference)


FAMILY = (
    sort,
    products,
    products,
    extreme_backward,
    softmax,
    graph_attention,
    message_passing,
    message_gradients,
)
