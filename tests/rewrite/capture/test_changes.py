"""Changes between two calls of a recorded layer: it returns the output of its forward each time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.lw_detr.modeling_lw_detr import LwDetrViTBackbone, LwDetrViTConfig

from hf_cpu_accel import accelerate_for_cpu
from tests.architectures.models import randomize
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import (
    error,
    in_use,
    plain,
    reasons,
    recorded,
    run,
    states,
)


class Scaled(Written):
    """Reads attributes, a config and a buffer."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.scale, self.repeats, self.named = 2.0, 1, {"shift": 1.0}
        self.factors: list[float] = [1.0, 3.0]
        self.config = SimpleNamespace(eps=0.5, norm=True)
        self.register_buffer("table", torch.arange(64.0) / 64)
        self.gain = nn.Parameter(torch.rand(64) / 8)

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden) * self.scale + self.factors[1] * self.table
        for _ in range(self.repeats):
            output = output * self.gain + self.config.eps
        return output.sin() if self.config.norm else output


def other_attribute(layer: Any) -> None:
    layer.scale = -1.0


def other_count(layer: Any) -> None:
    layer.repeats = 2


def other_config(layer: Any) -> None:
    layer.config.norm = False


def another_config(layer: Any) -> None:
    layer.config = SimpleNamespace(eps=3.0, norm=True)


def other_list(layer: Any) -> None:
    layer.factors[1] = -2.0


def other_buffer(layer: Any) -> None:
    layer.table = torch.ones(64)


def other_shape_of_a_buffer(layer: Any) -> None:
    layer.table = torch.ones(1)


def other_parameter(layer: Any) -> None:
    layer.gain = nn.Parameter(torch.ones(64))


def other_values(layer: Any) -> None:
    layer.gain.data = torch.full((64,), 0.5)


def loaded(layer: Any) -> None:
    layer.norms[1].load_state_dict({"weight": torch.full((64,), 0.3), "bias": torch.ones(64)})


def other_module(layer: Any) -> None:
    layer.norms[1] = nn.Identity()


def moved_modules(layer: Any) -> None:
    layer.query, layer.key = layer.key, layer.query


def own_forward(layer: Any) -> None:
    layer.norms[1].forward = lambda hidden: 2 * hidden


def other_function(layer: Any) -> None:
    layer.attend = lambda query, key, value, bias: plain(query, key, -value, bias)


def hook(layer: Any) -> None:
    layer.norms[1].register_forward_hook(lambda module, args, output: -output)


def hook_ahead(layer: Any) -> None:
    layer.norms[1].register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))


CHANGES = [
    *(other_attribute, other_count, other_config, another_config, other_list, other_buffer),
    *(other_shape_of_a_buffer, other_parameter, other_values, loaded, other_module, moved_modules),
    *(own_forward, other_function, hook, hook_ahead),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_user_changes_counts(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model = Stack(Scaled(), Scaled()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(3):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert len(in_use(model)) == 2
    before = run(eager, hidden)
    for stack in (model, eager):
        change(stack.layers[0])
    assert error(run(eager, hidden), before) > 1e-3
    for _ in range(3):
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5


def test_attributes_that_change_from_call_to_call() -> None:
    torch.manual_seed(0)
    model = Stack(Scaled(), Scaled()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for number in range(12):
        for stack in (model, eager):
            stack.layers[0].scale = float(number)
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert reasons(model) == {"its attributes change between calls"}
    assert len(in_use(model)) == 1


def test_layers_whose_outputs_transformers_collects() -> None:
    """Its hooks are there before acceleration, in backbones from the start: who asks for hidden states gets the forward's."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8}
    windows = {"window_block_indices": [0], "num_windows": 4, "out_indices": [3]}
    model = LwDetrViTBackbone(
        LwDetrViTConfig(image_size=64, pretrain_image_size=64, **sizes, **windows)
    ).eval()
    randomize(model)
    images = torch.randn(2, 3, 64, 64)

    def collected() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (*model(images, output_hidden_states=True).hidden_states, *model(images).feature_maps)

    expected = collected()
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(3):
        assert all(error(*pair) <= 1e-5 for pair in zip(collected(), expected, strict=True))
    assert len(in_use(model)) == len(recorded(model)) == 2
