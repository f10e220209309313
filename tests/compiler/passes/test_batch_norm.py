"""The pass that folds batch norms into the convolutions before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def _trained(norm: nn.Module) -> Any:
    """With statistics, and weights where it has some, unlike those of a new one."""
    with torch.no_grad():
        for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0) if name in ("running_var", "weight") else tensor.normal_()
    return norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "sizes"),
    [
        (nn.Conv1d, nn.BatchNorm1d, (9,)),
        (nn.Conv2d, nn.BatchNorm2d, (6, 7)),
        (nn.Conv3d, nn.BatchNorm3d, (4, 5, 6)),
    ],
)
def test_a_norm_behind_a_convolution_is_folded(
    layer: Any, norm: Any, sizes: tuple[int, ...], affine: bool, bias: bool, found: Any
) -> None:
    module = nn.Sequential(
        layer(3, 8, 3, stride=2, padding=1, bias=bias), _trained(norm(8, eps=1e-3, affine=affine)), nn.ReLU()
    )
    found(module, torch.randn(2, 3, *sizes))
    assert only_graph().rewrites["batch_norm"] == 1
    assert "aten.batch_norm.default" not in only_graph().rest


def test_statistics_that_change_are_folded_anew(compiled: Any) -> None:
    norm = _trained(nn.BatchNorm2d(8))
    module = nn.Sequential(nn.Conv2d(3, 8, 3), norm)
    call, batch = compiled(module), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        call(batch)
        norm.running_mean.add_(1.0)
        torch.testing.assert_close(call(batch), module(batch), atol=1e-5, rtol=1e-4)
    assert torch_private.counters("stats")["unique_graphs"] == 1


def _read_twice(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    return m.norm(y) + y


def _between(m: Any, x: Tensor) -> Tensor:
    return m.norm(torch.relu(m.layer(x)))


@pytest.mark.parametrize("function", [_read_twice, _between])
def test_other_norms_stay(function: Callable[[Any, Tensor], Tensor], found: Any) -> None:
    parts = {
        "layer": nn.Conv1d(4, 4, 1),
        "norm": _trained(nn.BatchNorm1d(4)),
    }
    found(Calls(function, **parts), torch.randn(3, 4, 6))
    assert only_graph().rewrites["batch_norm"] == 0
