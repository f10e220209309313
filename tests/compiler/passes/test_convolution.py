"""The pass that takes convolutions, with what is added to them and the activation behind, channels last from one to the next."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler.rewriter import Rewriter
from hf_cpu_accel.compiler.weight_transforms import PackedConvolution
from hf_cpu_accel.packing.linear import DTYPES
from hf_cpu_accel.providers import convolution as providers
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")
TURNS = {"aten.permute.default": 2}


@pytest.fixture(autouse=True)
def _ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "native_is_faster", lambda *args, **kwargs: True)


def norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    for tensor in (made.running_mean, made.weight.data, made.bias.data):
        tensor.normal_()
    made.running_var.uniform_(0.5, 2.0)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"kernel_size": (3, 1)}],
)
def test_images(options: dict[str, Any], bias: bool, found: Any) -> None:
    layer = nn.Conv2d(16, 24, **{"kernel_size": 3, "bias": bias, **options})
    assert found(layer, torch.randn(2, 16, 9, 8)) == {"conv2d": 1}
    assert only_graph().rest == TURNS


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2}, {"dilation": 2}])
def test_over_time(options: dict[str, Any], found: Any) -> None:
    assert found(nn.Conv1d(16, 24, 3, **options), torch.randn(2, 16, 9)) == {"conv2d": 1}
    assert "aten.conv1d.default" not in only_graph().rest


def test_a_residual_block_is_a_row_of_calls(found: Any) -> None:
    """Norms are folded and packed at once, the sum and its activation join the last convolution, and nothing is turned between."""

    def block(m: Any, x: Tensor) -> Tensor:
        y = torch.relu(m.norm1(m.first(x)))
        return torch.relu(m.norm2(m.second(y)) + m.norm3(m.shortcut(x)))

    module = Calls(
        block,
        first=nn.Conv2d(16, 32, 3, padding=1, bias=False),
        norm1=norm(32),
        second=nn.Conv2d(32, 32, 3, padding=1, bias=False),
        norm2=norm(32),
        shortcut=nn.Conv2d(16, 32, 1, bias=False),
        norm3=norm(32),
    )
    assert found(module, torch.randn(2, 16, 9, 8)) == {"conv2d": 3}
    assert only_graph().rewrites["batch_norm"] == 3
    assert only_graph().rewrites["convolution"] == 3
    assert only_graph().rest == {
        "aten.permute.default": 3
    }  # of the input for both that read it, and of the output


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU(), nn.Tanh()], ids=str)
def test_activations_join(activation: nn.Module, found: Any) -> None:
    assert found(nn.Sequential(nn.Conv2d(16, 16, 3), activation), torch.randn(2, 16, 9, 8)) == {"conv2d": 1}
    assert only_graph().rest == TURNS


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", "int8-weight"])
def test_narrow_weights_stay_close(dtype: str, compiled: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3)).eval()
    x = torch.randn(2, 16, 9, 8)
    with torch.no_grad():
        got, expected = compiled(module, dtype=dtype)(x), module(x)
    error = (got - expected).norm() / expected.norm()
    assert error < (
        1e-5 if dtype == "int8-weight" else 0.05
    )  # a convolution has no kernel for that: it stays float32
    assert only_graph().rewrites["convolution"] == 2


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(64, 40, 3), nn.Conv2d(128, 64, 1), nn.Conv1d(64, 48, 3)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shapes_that_a_graph_is_made_for_are_those_of_the_weight(layer: nn.Module, dtype: str) -> None:
    """Integer weights of 64 channels and more are for images that are quantized as a whole, and lie in another order."""
    recipe, weight = PackedConvolution(dtype, tiled=False), layer.weight.detach()
    made = recipe.make(weight)
    assert recipe.shapes(weight) == [(tuple(tensor.shape), tensor.dtype) for tensor in made]


def test_views_of_an_image_hold_in_its_new_layout(found: Any) -> None:
    """As models flatten the image into tokens, and back."""

    def tokens(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        rows = y.view(y.shape[0], 16, -1).transpose(1, 2)
        return m.layer(rows.transpose(1, 2).reshape(y.shape) + y) + rows.sum()

    assert found(Calls(tokens, layer=nn.Conv2d(16, 16, 3, padding=1)), torch.randn(2, 16, 4, 6)) == {
        "conv2d": 2
    }


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 32, 3),  # few channels
        nn.Conv2d(32, 32, 3, groups=2),
        nn.Conv2d(32, 32, 3, padding_mode="circular", padding=1, groups=32),
        nn.Conv3d(16, 16, 3),
    ],
)
def test_others_stay(module: nn.Module, found: Any) -> None:
    channels = module.in_channels
    sizes = (5,) * (module.weight.dim() - 2)
    assert found(module, torch.randn(2, channels, *sizes)) == {}


@pytest.mark.parametrize(("size", "ops"), [(3, {}), (1, {"conv2d": 1})])  # pixels are a linear layer
def test_the_library_serves_where_it_is_faster(
    size: int, ops: dict[str, int], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "native_is_faster", lambda *args, **kwargs: False)
    assert found(nn.Conv2d(16, 24, size), torch.randn(2, 16, 9, 8)) == ops


def _written(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[:, :2] = 0
    return torch.relu(y)


def _read_twice(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    return torch.relu(y) + y


def test_parts_of_an_image_are_known_to_lie_as_it_does(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later passes ask how values lie in memory; these were captured when the image had its channels first."""
    seen = []
    refresh = Rewriter.refresh
    monkeypatch.setattr(Rewriter, "refresh", lambda self: seen.append(self) or refresh(self))

    def function(m: Any, x: Tensor) -> Tensor:
        first, second = m.layer(x).chunk(2, dim=1)
        return first * second

    assert found(Calls(function, layer=nn.Conv2d(16, 32, 3)), torch.randn(2, 16, 6, 7)) == {"conv2d": 1}
    parts = list(seen[0].calls(operator.getitem))
    assert [part.meta["val"].stride(1) for part in parts] == [1, 1]


def test_a_view_that_is_written_to_stays_one(found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.view(y.shape[0], -1)[:, 0] = 0
        return y

    assert found(Calls(function, layer=nn.Conv2d(16, 16, 3)), torch.randn(2, 16, 6, 7)) == {}


@pytest.mark.parametrize("function", [_written, _read_twice])
def test_values_that_others_need_stay(function: Callable[..., Tensor], found: Any) -> None:
    assert found(Calls(function, layer=nn.Conv2d(16, 16, 3)), torch.randn(2, 16, 6, 7)) == {"conv2d": 1}
    assert "aten.relu.default" in only_graph().rest
