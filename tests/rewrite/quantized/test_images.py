"""Consecutive convolutions of PT2E graphs become one call, with images in the ranges of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.quantized import images
from hf_cpu_accel.rewrite.quantized.graph import with_lowered
from hf_cpu_accel.rewrite.quantized.images import STRUCTURE, JoinedConvolutions
from tests.rewrite.quantized.test_graph import Product, distance, rounded

# How a block is written: which of its convolutions adds, whether in place, and what else reads an image.
FORMS = ("first", "last", "in place", "twice")


class Block(nn.Module):
    """A bottleneck after a stem and a pooling, as PT2E leaves one: whichever convolution adds is not rounded before the sum."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.plain = nn.ModuleDict(
            {
                "stem": nn.Conv2d(64, 64, 3, padding=1),
                "narrow": nn.Conv2d(64, 64, 1),
                "window": nn.Conv2d(64, 64, 3, padding=1),
                "wide": nn.Conv2d(64, 128, 1),
                "shortcut": nn.Conv2d(64, 128, 1),
                "head": nn.Linear(128, 40),
            }
        )
        self.of = nn.ModuleDict({name: Product(layer, "static") for name, layer in self.plain.items()})

    def run(self, x: Tensor, products: Any, how: str) -> Tensor:
        x = rounded(F.max_pool2d(rounded(products["stem"](x).relu(), how), 3, 2, 1), how)
        y = rounded(products["window"](rounded(products["narrow"](x).relu(), how)).relu(), how)
        wide, shortcut = products["wide"](y), products["shortcut"](x)
        if self.form == "first":  # `wide` adds, though it is computed first
            shortcut = rounded(shortcut, how)
        else:
            wide = rounded(wide, how)
        total = shortcut.add_(wide) if self.form == "in place" else wide + shortcut
        x = rounded(total.relu(), how).mean((2, 3))
        return products["head"](x + y.mean() if self.form == "twice" else x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.of, "static")


def exported(form: str) -> tuple[GraphModule, Tensor, Tensor]:
    """Return the graph, an input, and the output of the quantized network."""
    torch.manual_seed(0)
    block, x = Block(form).eval(), torch.randn(2, 64, 18, 17)
    with torch.no_grad():
        return torch.export.export(block, (x,)).module(), x, block.run(x, block.plain, "no")


def accelerated(form: str) -> GraphModule:
    """The graph, as near to the network as it was."""
    graph, x, exact = exported(form)
    with torch.no_grad():
        before = graph(x)
        accelerate_for_cpu(graph)
        assert distance(graph(x), exact) < 1.2 * distance(before, exact)
        copied, _, _ = exported(form)
        assert torch.equal(copied(x), before)
    return graph


@pytest.mark.parametrize("form", FORMS[:3])
def test_one_call_in_the_ranges_of_the_graph(form: str) -> None:
    graph = accelerated(form)
    lowered = with_lowered(graph)
    (joined,) = (module for module in lowered.modules() if isinstance(module, JoinedConvolutions))
    assert explain(graph).counts()[STRUCTURE] == 1
    calls = [node.target for node in lowered.graph.nodes if node.op == "call_module"]
    assert calls[-2:] == ["joined_convolutions", "of.head"]
    ranges = [getattr(step, "range", None) for step in joined._steps()]
    # All but that of the pooling, which is its input's, and the last.
    assert [range is not None for range in ranges].count(True) == 4
    restore(graph)
    other, x, _ = exported(form)
    with torch.no_grad():
        assert torch.equal(graph(x), other(x))


def test_what_else_reads_an_image_keeps_them_apart() -> None:
    assert STRUCTURE not in explain(accelerated("twice")).counts()


def test_what_they_compute_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "row_error", lambda ours, theirs, dim: 1.0)
    assert STRUCTURE not in explain(accelerated("last")).counts()
