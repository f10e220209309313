"""Families of transformers, compiled, give eager's answers for all sizes. These are those that differ most from one another, with
one layer where all layers are alike (what passes from layer to layer is in test_models.py). All of them, with two layers, are in
all_families.py, which takes some minutes: `make test-compile-families`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import report, torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from tests.compiler.families import FAMILIES, Batch, Family

SAMPLE = ("deberta-v2", "modernbert", "gpt-j", "gemma3", "mixtral", "bart", "dinov3", "wav2vec2", "clip")
DIFFERENT_LAYERS = ("modernbert", "gemma3")
DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers")
SIZES = ((2, 16), (3, 24), (4, 11))


def of_one_layer(settings: dict[str, Any]) -> dict[str, Any]:
    """A model's settings, and those of the models in it."""
    shallow = {
        name: of_one_layer(value) if isinstance(value, dict) else value for name, value in settings.items()
    }
    return {**shallow, **dict.fromkeys(shallow.keys() & set(DEPTHS), 1)}


def check(family: Family) -> None:
    """Compile the model with sizes dynamic, compare for three sizes, and count the graphs and breaks."""
    model = family.build()
    fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
    for batch, length in SIZES:
        inputs = family.inputs(batch, length)
        with torch.no_grad():
            pairs = zip(kept(fast(**inputs), inputs), kept(model(**inputs), inputs), strict=True)
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    breaks, graphs = torch_private.counters("graph_break"), len(report.graphs())
    assert bool(breaks) == (family.breaks is not None), dict(breaks)
    if family.breaks is None:
        assert graphs == 1 if family.sizes is None else 1 < graphs <= len(SIZES)


def kept(output: object, inputs: Batch) -> list[Tensor]:
    """The floating tensors of an output, without what stands at the padding: that is nobody's."""
    return [_unpadded(tensor, inputs.get("attention_mask")) for tensor in floats(output)]


def floats(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, dict | tuple | list):
        for part in output.values() if isinstance(output, dict) else output:
            yield from floats(part)


def _unpadded(output: Tensor, mask: Tensor | None) -> Tensor:
    return output if mask is None or output.shape[:2] != mask.shape else output[mask.bool()]


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("name", SAMPLE)
def test_the_rewritten_graph_gives_the_same(name: str) -> None:
    family = FAMILIES[name]
    check(family if name in DIFFERENT_LAYERS else replace(family, settings=of_one_layer(family.settings)))


class Mapped(nn.Module):
    """A linear layer under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.linear)(x)


@pytest.mark.usefixtures("no_codegen")
def test_transformed_functions_are_left_alone() -> None:
    model, x = Mapped().eval(), torch.randn(3, 5, 16)
    with torch.no_grad():
        got, expected = torch.compile(model, backend=hf_cpu_accel, dynamic=True)(x), model(x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert "transformed by torch.func" in str(report.graphs()[0].left)


@pytest.mark.usefixtures("no_codegen")
def test_what_is_left_runs_without_a_compiler() -> None:
    model, x = Mapped().eval(), torch.randn(3, 5, 16)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend=hf_cpu_accel)(x), expected)
    assert report.graphs()[0].left == "gradients are needed"
