"""Sizes of inputs that are computed from each other: positions for a text and an image together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler.background import trace
from hf_cpu_accel.compiler.background.bound import Library, _value
from hf_cpu_accel.compiler.background.trace import _is_formula


class Joined(nn.Module):
    """As the blocks of multi-modal diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, text: Tensor, image: Tensor, positions: Tensor) -> Tensor:
        return self.linear(torch.cat([text, image], dim=1)) + positions


def inputs(batch: int, texts: int, images: int, positions: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, texts, 8), torch.randn(batch, images, 8), torch.randn(positions, 8)


@torch.no_grad()
def test_formulas_are_held_against_later_calls(tmp_path: Path) -> None:
    block = Joined().eval()
    args = inputs(2, 3, 4, 7)
    compiled = trace.compile_block(block, args, {}, tmp_path, threads=1)
    library = Library(compiled, tmp_path)
    for sizes, fits in (
        ((2, 3, 4, 7), True),
        ((3, 5, 6, 11), True),
        ((2, 5, 6, 12), False),
        ((2, 5, 6, 10), False),
    ):
        call = inputs(*sizes)
        assert library.takes(call, {}, list(call)) is fits, sizes


def test_a_formula_without_a_value_fits_nothing() -> None:
    assert _value("s0 // s1", {"s0": 4, "s1": 2}) == 2
    assert _value("s0 // s1", {"s0": 4, "s1": 0}) is None


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("s0 + s1", True),
        ("2*s0 - 1", True),
        ("(s0//2)", True),
        ("s0 + s9", False),
        ("Max(s0, s1)", False),
        ("s0 +", False),
    ],
)
def test_only_arithmetic_on_known_symbols_is_believed(text: str, fits: bool) -> None:
    assert _is_formula(text, {"s0", "s1"}) is fits
