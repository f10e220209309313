"""Group norms on graphs of a few nodes: with a SiLU after them, and what must be left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def test_a_group_norm_is_one_call(found: Any) -> None:
    assert found(Calls(lambda m, x: m.norm(x), norm=nn.GroupNorm(4, 8)), torch.randn(2, 8, 5, 6)) == {
        "group_norm": 1
    }
    assert only_graph().rewrites["group_norm"] == 1
    assert only_graph().rest == {}


@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 7), (3, 8)])
def test_silu_goes_into_a_group_norm(shape: tuple[int, ...], found: Any) -> None:
    module = Calls(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, 8))
    assert found(module, torch.randn(shape)) == {"group_norm": 1}
    assert only_graph().rewrites["group_norm"] == 2
    assert only_graph().rest == {}


def test_a_group_norm_that_others_read_keeps_its_silu_apart(found: Any) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return F.silu(y) + y

    module = Calls(both, norm=nn.GroupNorm(4, 8))
    assert found(module, torch.randn(2, 8, 5)) == {"group_norm": 1}
    assert only_graph().rest["aten.silu.default"] == 1


def test_group_norms_in_other_dtypes_stay(found: Any) -> None:
    module = Calls(lambda m, x: m.norm(x.double()).float(), norm=nn.GroupNorm(4, 8).double())
    assert found(module, torch.randn(2, 8, 5)) == {}
