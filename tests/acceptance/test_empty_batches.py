"""Batches of nothing, and sequences without tokens, give what eager gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.acceptance.modules import MODULES
from tests.compiler.families import FAMILIES

# Models of transformers that take a batch of nothing; most others reshape by -1 themselves.
TAKEN = ("resnet", "convnext", "mobilenet-v2", "mamba")


def shapes(output: Any) -> Any:
    """Of all tensors in it."""
    if isinstance(output, Tensor):
        return tuple(output.shape)
    values = output.values() if isinstance(output, dict) else output
    return [shapes(value) for value in values if isinstance(value, Tensor | tuple | list)]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", [name for name in MODULES if name != "one image"])
@torch.no_grad()
def test_each_kind_of_module(name: str, dtype: str, warm: bool) -> None:
    build, (example, *_) = MODULES[name]
    model = build().eval()
    full = [torch.randn(shape) for shape in example]
    calls = [[tensor.narrow(dim, 0, 0) for tensor in full] for dim in (0, 1)]
    calls.append([full[0].narrow(1, 0, 0), *full[1:]])
    taken = [(call, output) for call in calls if (output := _shapes_in_eager(model, call)) is not None]
    assert taken
    for call, expected in taken:
        fast = accelerate_for_cpu(copy.deepcopy(model), dtype=dtype)
        if warm:
            fast(*full)
        assert shapes(fast(*call)) == expected
        assert shapes(fast(*full)) == shapes(model(*full))


def _shapes_in_eager(model: nn.Module, call: list[Tensor]) -> Any:
    try:
        return shapes(model(*call))
    except RuntimeError:
        return None


@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_a_whole_transformer(batch_first: bool) -> None:
    model = nn.Transformer(64, 4, 1, 1, 128, batch_first=batch_first).eval()
    fast = accelerate_for_cpu(copy.deepcopy(model), dtype="float32")
    for batch, source, target in ((0, 9, 5), (2, 0, 0), (2, 9, 0)):
        sizes = [(batch, length) if batch_first else (length, batch) for length in (source, target)]
        call = [torch.randn(*size, 64) for size in sizes]
        assert shapes(fast(*call)) == shapes(model(*call))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_models(name: str, warm: bool) -> None:
    family = FAMILIES[name]
    model, full = family.build(), family.inputs(2, 12)
    empty = {key: value[:0] for key, value in full.items()}
    expected = shapes(model(**empty))
    fast = accelerate_for_cpu(copy.deepcopy(model), dtype="float32")
    if warm:
        fast(**full)
    assert shapes(fast(**empty)) == expected
