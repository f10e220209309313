"""Sizes of inputs that are computed from each other: positions for a text and an image together."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.background import trace
from hf_cpu_accel.compiler.background.bound import Library
from hf_cpu_accel.compiler.background.expressions import Expression
from hf_cpu_accel.compiler.background.trace import _is_expression_of


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces alone, without a library: nothing is called."""
    for name in ("write_library", "load_library"):
        monkeypatch.setattr(torch_private, name, lambda *arguments: None)


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
def test_formulas_are_held_against_later_calls(tmp_path: Path, not_compiled: None) -> None:
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
        assert library.takes(list(call)) is fits, sizes


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
    assert _is_expression_of({"s0", "s1"}, text) is fits


SIZES = {"s0": 14, "s1": 4, "t0_1": 9}


@pytest.mark.parametrize(
    "text",
    [
        "s0 // s1 + 2*s0 - s1**2 % 5",
        "(1 + (((-1) + math.trunc(1.5*torch.sym_float(t0_1))) // 2)) % 8 == 7",
        "max(1, s0 // 7) != s0 or not (s0 % 7) == 0",
        "s1 <= s0 > 3 and 2 <= t0_1 < 10",
        "min(s0, s1, 3) if s0 > s1 else abs(-s1)",
        "math.floor(s0 / 4) + math.ceil(torch._sym_sqrt(s1)) + round(s0 / 3) + 1.0",
        "True",
    ],
)
def test_expressions_mean_what_they_do_in_python(text: str) -> None:
    names = {"math": math, "torch": SimpleNamespace(sym_float=float, _sym_sqrt=math.sqrt)}
    assert Expression(text)(SIZES) == eval(text, names, SIZES)
    assert Expression(text).names <= SIZES.keys()


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__base__.__subclasses__()",
        "L['args'][0].size()[0]",
        "math.factorial(s0)",
        "math.floor.__self__",
        "open",  # a name alone is a size, which there is not
        "[s0][0]",
        "s0 if s1",
        "(lambda: s0)()",
        "max(*t0_1)",
        "max(s0, key=s1)",
        "'s0' * 9",
        "s0 << 60",
        "9" * 5000,
        str(1 << 63),
        "s0 := 3",
        "(" * 5000 + "s0" + ")" * 5000,
        "-" * 60000 + "s0",
        "s0+" * 40000 + "s0",
        "s0\0",
        "",
    ],
    ids=lambda text: text[:20],
)
def test_anything_else_is_refused(text: str) -> None:
    assert not _is_expression_of(SIZES.keys(), text)


@pytest.mark.parametrize(
    "text",
    [
        "s0 // (s1 - 4)",
        "9**63",
        "s0**s0**s0",
        "2**(0 - s0)",
        "torch._sym_sqrt(s1 - s0)",
        "max(s0)",
        "(0 - s0)**0.5 < 3",
    ],
)
def test_an_expression_without_a_value_fits_nothing(text: str) -> None:
    assert Expression(text)(SIZES) is None


class Windows(nn.Module):
    """As those of Swin: whether they divide the image is a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, image: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        batch, length, width = image.shape
        if length % 7 == 0:
            image = image.view(batch, length // 7, 7, width).mean(2)
        return self.linear(image) + extra["bias"].sum()


@torch.no_grad()
def test_guards_are_held_against_later_calls(tmp_path: Path, not_compiled: None) -> None:
    block, bias = Windows().eval(), torch.randn(3)
    compiled = trace.compile_block(
        block, (torch.randn(2, 14, 8),), {"extra": {"bias": bias}}, tmp_path, threads=1
    )
    assert any("t0_1 % 7 == 0" in guard for guard in compiled.guards)
    library = Library(compiled, tmp_path)
    assert [library.takes([torch.randn(3, length, 8), bias]) for length in (21, 22, 28, 7)] == [
        True,
        False,
        True,
        False,
    ]
