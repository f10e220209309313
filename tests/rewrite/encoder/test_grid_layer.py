"""Layers with row and column biases (SAM, ViTDet) in a few ops, for images of every size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SamVisionConfig, SamVisionModel, VitDetConfig, VitDetModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder.grid_layer import FusedGridLayer
from hf_cpu_accel.rewrite.encoder.grid_match import STRUCTURE

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.06}
_LAYERS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def sam(**changes: Any) -> nn.Module:
    """The first layer in windows of 5, the second everywhere, over 12 x 12 patches."""
    sizes = {"image_size": 96, "patch_size": 8, "mlp_dim": 96, "window_size": 5, "output_channels": 32}
    return with_tables(
        SamVisionModel(SamVisionConfig(**{**_LAYERS, **sizes, "global_attn_indexes": [1], **changes}))
    )


def vitdet(**changes: Any) -> nn.Module:
    sizes = {"image_size": 96, "pretrain_image_size": 96, "patch_size": 8, "window_size": 5}
    options = {"window_block_indices": [0], "use_relative_position_embeddings": True, **changes}
    return with_tables(VitDetModel(VitDetConfig(**{**_LAYERS, **sizes, **options})))


def with_tables(model: nn.Module) -> nn.Module:
    """Biases of positions start at zero, and SAM's weights near it, where they would show nothing."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 if "rel_pos" in name else 0.1)
    return model.eval()


MODELS = {
    "sam": sam,
    "vitdet": vitdet,
    "vitdet without biases": lambda: vitdet(use_relative_position_embeddings=False),
}


def run(model: nn.Module, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return model(pixel_values=pixels)[0]


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedGridLayer)]


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_the_way_back(name: str, dtype: str) -> None:
    model = MODELS[name]()
    originals = [type(module) for module in model.modules()]
    images = [torch.randn(2, 3, 96, 96), torch.randn(1, 3, 96, 96)]
    expected = [run(model, pixels) for pixels in images]
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()[STRUCTURE] == len(layers(model)) == 2
    for pixels, theirs in zip(images, expected, strict=True):
        assert error(run(model, pixels), theirs) <= TOLERANCES[dtype]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, images[0]), run(model, images[0]))
    restore(model)
    assert [type(module) for module in model.modules()] == originals
    assert all(torch.equal(run(model, p), theirs) for p, theirs in zip(images, expected, strict=True))


@pytest.mark.parametrize("shape", [(1, 3, 4, 64), (2, 5, 5, 64), (1, 11, 7, 64), (2, 16, 21, 64)])
def test_images_that_the_tables_were_not_made_for(shape: tuple[int, ...]) -> None:
    """Tables are stretched where all attend to all; where images are cut into windows, the last ones are padded."""
    model = sam()
    image = torch.randn(shape)
    with torch.no_grad():
        expected = [layer(image) for layer in model.vision_encoder.layers]
        accelerate_for_cpu(model, dtype="float32")
        for layer, theirs in zip(model.vision_encoder.layers, expected, strict=True):
            torch.testing.assert_close(layer(image), theirs, rtol=1e-4, atol=1e-4)


def test_hooks_inside_see_what_they_saw() -> None:
    model = accelerate_for_cpu(sam(), dtype="float32")
    seen: list[tuple[int, ...]] = []
    handle = model.vision_encoder.layers[0].mlp.register_forward_hook(
        lambda _, args, output: seen.append(output.shape)
    )
    with_hook = run(model, torch.ones(1, 3, 96, 96))
    assert seen == [(1, 12, 12, 64)]
    handle.remove()
    torch.testing.assert_close(run(model, torch.ones(1, 3, 96, 96)), with_hook, rtol=1e-4, atol=1e-4)


def test_written_tables_are_read_anew() -> None:
    model = accelerate_for_cpu(sam(), dtype="float32")
    pixels = torch.randn(1, 3, 96, 96)
    before = run(model, pixels)
    with torch.no_grad():
        model.vision_encoder.layers[1].attn.rel_pos_h.mul_(-2)
    after = run(model, pixels)
    restore(model)
    assert error(after, before) > 1e-2
    assert error(after, run(model, pixels)) <= 1e-5


def test_a_layer_that_does_something_else_is_left() -> None:
    class Shifted(type(sam().vision_encoder.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states).roll(1, 1)

    model = sam()
    model.vision_encoder.layers[1].__class__ = Shifted
    accelerate_for_cpu(model, dtype="float32")
    assert len(layers(model)) == 1
    recorded = {item.name for item in explain(model).items if item.structure == "recorded layer"}
    assert recorded == {"vision_encoder.layers.1"}
