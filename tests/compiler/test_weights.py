"""Packed weights follow their parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import weight_transforms
from hf_cpu_accel.compiler.weight_transforms import JoinedBiases, PackedLinears, derive
from hf_cpu_accel.packing.linear import DTYPES, pack_linear, unpack_linear

pytestmark = pytest.mark.usefixtures("no_codegen")


def layer() -> nn.Linear:
    return nn.Linear(16, 32).eval()


def agree(fast: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    input = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(input), model(input), atol=1e-5, rtol=1e-4)


def test_a_weight_that_is_written_to_is_packed_again(compiled: Callable[..., Any]) -> None:
    model = layer()
    fast = compiled(model)
    agree(fast, model)
    with torch.no_grad():
        model.weight.mul_(2)
    agree(fast, model)
    model.weight.data = torch.randn(32, 16)
    agree(fast, model)
    model.load_state_dict(layer().state_dict())
    agree(fast, model)


def test_a_parameter_that_is_replaced_is_packed_again(compiled: Callable[..., Any]) -> None:
    model = layer()
    fast = compiled(model)
    agree(fast, model)
    model.weight = nn.Parameter(torch.randn(32, 16))
    agree(fast, model)


def _ema(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.99).add_(torch.randn(parameter.shape), alpha=0.01)


def _load(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))


def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _write_by_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[:] += 0.25


def _write_one_row(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data[-1] += 1.0


WRITES = [_ema, _load, _scale, _write_by_numpy]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("width", [16, 48, 700])  # compared as wholes, and by some of their values
def test_writes_that_have_no_version_are_noticed(
    compiled: Callable[..., Any], write: Callable[[nn.Module], None], width: int
) -> None:
    model = nn.Sequential(
        nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 8)
    ).eval()
    fast, inputs = compiled(model), torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(inputs), model(inputs), atol=1e-4, rtol=1e-3)
            write(model)
        torch.testing.assert_close(fast(inputs), model(inputs), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_convolutions_are_noticed(
    compiled: Callable[..., Any], write: Callable[[nn.Module], None]
) -> None:
    layers = (nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    model = nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)
    fast, images = compiled(model), torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        fast(images)
        write(model)
        torch.testing.assert_close(fast(images), model(images), atol=1e-3, rtol=1e-3)


def test_a_write_to_one_row_of_a_small_weight_is_noticed(compiled: Callable[..., Any]) -> None:
    model = layer()
    fast = compiled(model)
    agree(fast, model)
    _write_one_row(model)
    agree(fast, model)


def test_another_graph_notices_a_write_too(compiled: Callable[..., Any]) -> None:
    model = layer()
    first, second = compiled(model), compiled(nn.Sequential(model))
    agree(first, model)
    agree(second, model)
    model.weight.data.mul_(2)
    agree(first, model)
    agree(second, model)


def test_nothing_is_packed_again_without_a_reason(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    monkeypatch.setattr(
        weight_transforms, "pack_linear", lambda *a, **k: packed.append(a) or pack_linear(*a, **k)
    )
    model = layer()
    first = compiled(model)
    agree(first, model)
    agree(first, model)
    agree(compiled(nn.Sequential(model)), model)  # another graph, the same parameter
    assert len(packed) == 1


def test_the_model_and_its_packed_weights_can_go(compiled: Callable[..., Any]) -> None:
    model = layer()
    fast = compiled(model)
    agree(fast, model)
    weight, packed = weakref.ref(model.weight), weakref.ref(derive(PackedLinears("float32"), [model.weight]))
    assert weight() is not None
    assert packed() is not None
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert packed() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_of_recipes_are_those_of_what_they_make(dtype: str, transposed: bool) -> None:
    weights = [torch.randn(64, 40), torch.randn(33, 40)]
    recipe = PackedLinears(dtype, transposed)
    sources = [weight.t().contiguous() if transposed else weight for weight in weights]
    made = recipe.make(*sources)
    assert recipe.shapes(*sources) == [(tuple(tensor.shape), tensor.dtype) for tensor in made]
    joined = pack_linear(torch.cat(weights), dtype)
    torch.testing.assert_close(made[0], joined.data)


def test_biases_that_are_missing_are_zeros() -> None:
    bias = torch.randn(32, dtype=torch.bfloat16)
    recipe = JoinedBiases(((32, True), (64, False)))
    (joined,) = recipe.make(bias)
    assert recipe.shapes(bias) == [((96,), torch.float32)]
    torch.testing.assert_close(joined, torch.cat([bias.float(), torch.zeros(64)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_dtype_of_weights_is_an_option(compiled: Callable[..., Any], dtype: str) -> None:
    model, input = layer(), torch.randn(5, 16)
    packed = pack_linear(model.weight, dtype)
    with torch.no_grad():
        expected = torch.nn.functional.linear(input, unpack_linear(packed), model.bias)
        torch.testing.assert_close(compiled(model, dtype=dtype)(input), expected, atol=0.05, rtol=0.02)
        assert compiled(model, dtype=dtype)(input).dtype is torch.float32
