"""Every layer class under autocast, in bfloat16 and float64, and with edge weights of another dtype: PyTorch Geometric's dtypes."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from tests.hosts.pyg_classes import CLASSES, EDGES, FEATURES, SOURCES, arguments_of

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")

# The dtype of the layer and its inputs, that of the edge weights (None: the layer gets none), whether under autocast.
CASES = {
    "autocast": (torch.float32, None, True),
    "bfloat16": (torch.bfloat16, None, False),
    "float64": (torch.float64, None, False),
    "float64 weights": (torch.float32, torch.float64, False),
    "float32 weights of bfloat16": (torch.bfloat16, torch.float32, False),
}


def call(conv: nn.Module, arguments: dict[str, Tensor], autocast: bool) -> Tensor | Exception:
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = conv(**arguments)
    except (AssertionError, RuntimeError) as error:
        return error
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_dtypes(name: str, case: str) -> None:
    dtype, weight_dtype, autocast = CASES[case]
    generator = torch.Generator().manual_seed(0)
    conv = CLASSES[name]().to(dtype)
    arguments = {"x": torch.randn(SOURCES, FEATURES, generator=generator), **arguments_of(name, generator)}
    arguments = {key: a.to(dtype) if a.is_floating_point() else a for key, a in arguments.items()}
    arguments["edge_index"] = torch.randint(0, SOURCES, (2, EDGES), generator=generator)
    if weight_dtype is not None:
        if "edge_weight" not in inspect.signature(conv.forward).parameters:
            return  # the layer takes no weights
        arguments["edge_weight"] = torch.rand(EDGES, generator=generator, dtype=weight_dtype)
    expected = call(conv, arguments, autocast)
    output = call(accelerate_for_cpu(copy.deepcopy(conv), dtype="float32"), arguments, autocast)
    if isinstance(expected, Exception):
        assert isinstance(output, type(expected))
        return
    assert isinstance(output, Tensor), output
    assert output.dtype is expected.dtype
    tolerance = 3e-2 if autocast or dtype is torch.bfloat16 else 1e-4 if dtype is torch.float32 else 1e-9
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
