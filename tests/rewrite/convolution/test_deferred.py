"""Convolutions that fuse following ops, and whose outputs otherwise act like any tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.convolution import gemm as gemm
from hf_cpu_accel.rewrite.convolution import match as onednn
from tests.rewrite.convolution.convolution_blocks import Bottleneck, Residual, with_statistics

TOLERANCES = {"float32": 1e-5, "int8": 0.04}


class Block(nn.Module):
    """A convolution next to an activation; the test chooses the ops after it."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(32, 32, size, padding=size // 2)
        self.act = nn.ReLU()
        self.then: Callable[[Tensor, Tensor], Tensor] = lambda output, x: output

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.convolution(x), x)


def block_of(then: Callable[[Tensor, Tensor], Tensor], size: int = 3) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(Block(size)).eval()
    model[0].then = then
    return model, torch.randn(2, 32, 7, 6).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(activation, whether there is a residual) of every convolution that was computed."""
    seen: list[tuple[str, bool]] = []
    convolve, conv2d = onednn.convolve, gemm.conv2d

    def by_onednn(image, packed, bias, geometry, activation, residual):  # type: ignore[no-untyped-def]
        seen.append((activation, residual is not None))
        return convolve(image, packed, bias, geometry, activation, residual)

    def by_us(*args, activation, residual, **window):  # type: ignore[no-untyped-def]
        seen.append((activation, residual is not None))
        return conv2d(*args, activation=activation, residual=residual, **window)

    monkeypatch.setattr(onednn, "convolve", by_onednn)
    monkeypatch.setattr(gemm, "conv2d", by_us)
    return seen


def _in_place(output: Tensor, x: Tensor) -> Tensor:
    output += x
    return functional.relu(output, inplace=True)


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[str, bool]]] = {
    "relu": (lambda output, x: functional.relu(output), ("relu", False)),
    "relu in place": (lambda output, x: output.relu_(), ("relu", False)),
    "silu": (lambda output, x: functional.silu(output), ("silu", False)),
    "silu in place": (lambda output, x: functional.silu(output, inplace=True), ("silu", False)),
    "gelu": (lambda output, x: functional.gelu(output), ("gelu", False)),
    "gelu, tanh": (lambda output, x: functional.gelu(output, approximate="tanh"), ("gelu_tanh", False)),
    "relu6": (lambda output, x: functional.relu6(output), ("relu6", False)),
    "relu6 in place": (lambda output, x: functional.relu6(output, inplace=True), ("relu6", False)),
    "hardswish": (lambda output, x: functional.hardswish(output), ("hardswish", False)),
    "hardswish in place": (
        lambda output, x: functional.hardswish(output, inplace=True),
        ("hardswish", False),
    ),
    "sum": (lambda output, x: (output + x) * 2, ("none", True)),
    "sum from the other side": (lambda output, x: (x + output) * 2, ("none", True)),
    "sum and relu": (lambda output, x: functional.relu(x + output), ("relu", True)),
    "divided by one": (lambda output, x: functional.relu((x + output) / 1.0), ("relu", True)),
    "sum and relu in place": (_in_place, ("relu", True)),
}
APART: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda output, x: torch.sigmoid(output),
    "clipped elsewhere": lambda output, x: functional.hardtanh(output, 0.0, 5.0),
    "weighted sum": lambda output, x: torch.add(output, x, alpha=2),
    "sum with a row": lambda output, x: output + x[:, :, :1],
    "sum with a number": lambda output, x: output + 1,
    "sum with itself": lambda output, x: output + output,
    "sum with itself in place": lambda output, x: output.add_(output),
    "joined with others": lambda output, x: torch.cat([output, x], dim=1),
    "added to the input": lambda output, x: x.clone().add_(output),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", JOINED)
def test_what_comes_next_joins(kind: str, dtype: str, calls: list[tuple[str, bool]]) -> None:
    then, expected_call = JOINED[kind]
    model, x = block_of(then)
    before, expected = x.clone(), model(x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    calls.clear()  # the comparison before it was put in place
    for _ in range(2):
        output = model(x)
        assert (output - expected).norm() <= TOLERANCES[dtype] * expected.norm()
        assert output.is_contiguous(memory_format=torch.channels_last)
    assert calls == [expected_call] * 2
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", JOINED)
def test_pixels_take_along_what_comes_next(kind: str) -> None:
    model, x = block_of(JOINED[kind][0], size=1)
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    for input in (x, x.contiguous()):
        torch.testing.assert_close(model(input), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", APART)
def test_where_nothing_joins_it_does_not_wait_again(
    kind: str, dtype: str, calls: list[tuple[str, bool]]
) -> None:
    model, x = block_of(APART[kind])
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    calls.clear()
    for _ in range(2):
        assert (model(x) - expected).norm() <= TOLERANCES[dtype] * expected.norm()
    assert calls == [("none", False)] * 2
    assert not model[0].convolution.waits


def test_what_is_read_twice_is_computed_twice_only_once(calls: list[tuple[str, bool]]) -> None:
    readers: list[tuple[Callable[[Tensor, Tensor], Tensor], list[tuple[str, bool]]]] = [
        (
            lambda output, x: functional.relu(output) * output,
            [("relu", False), ("none", False), ("none", False)],
        ),
        (lambda output, x: (output + x) * 2 + output * 3, [("none", True), ("none", False), ("none", False)]),
        (
            lambda output, x: output.relu() + output.relu(),
            [("relu", False), ("relu", False), ("none", False)],
        ),
    ]
    for then, expected_calls in readers:
        model, x = block_of(then)
        expected = model(x).detach()
        accelerate_for_cpu(model, dtype="float32")
        calls.clear()
        for _ in range(2):
            torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        assert calls == expected_calls


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_residual_blocks(dtype: str, calls: list[tuple[str, bool]]) -> None:
    model = with_statistics(nn.Sequential(Bottleneck(32, 24), Residual(48), Residual(48)))
    x = torch.randn(2, 32, 8, 8)
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    for _ in range(3):
        calls.clear()
        output = model(x) + 0
        assert (output - expected).norm() <= TOLERANCES[dtype] * expected.norm()
    pixels = dtype == "int8"  # else they are linears
    assert calls.count(("relu", True)) == pixels
    assert calls.count(("none", True)) == 2
    assert calls.count(("relu", False)) == 3 + pixels


def test_a_waiting_convolution_is_a_tensor_like_any_other() -> None:
    model, x = block_of(lambda output, x: output)
    expected = model[0].convolution(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    for read in (lambda t: t + 0, lambda t: torch.cat([t]), lambda t: t.clone(), lambda t: t.flatten(2)):
        model[0].convolution.waits = True
        pending = model(x)
        assert isinstance(pending, LazyTensor)
        assert (pending.shape, pending.stride(), pending.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        torch.testing.assert_close(read(pending).reshape(expected.shape), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("write", ["input", "residual"])
def test_what_was_written_to_is_not_read(write: str) -> None:
    model, x = block_of(lambda output, x: output)
    accelerate_for_cpu(model, dtype="float32")
    residual = torch.randn_like(x)
    pending = model(x) + residual
    (x if write == "input" else residual).add_(1)
    with pytest.raises(RuntimeError, match="was written to"):
        functional.relu(pending)


def test_bfloat16_and_inference_mode() -> None:
    model, x = block_of(lambda output, x: functional.relu(output + x))
    model, x = model.bfloat16(), x.bfloat16()
    expected = model(x).detach()
    accelerate_for_cpu(model, dtype="float32")
    with torch.inference_mode():
        output = model(x.clone())
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0.05, rtol=0.03)


def test_what_the_model_itself_calls_does_not_wait() -> None:
    """Its output may be the model's."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()).eval()
    accelerate_for_cpu(model, dtype="float32")
    assert not isinstance(model[0](torch.randn(1, 16, 5, 5)), LazyTensor)
