"""Tiny random models of diffusers, compiled: one graph for all sizes, and eager's answers. Not in the suite, since tracing them
takes minutes: `make test-compile-families` runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from tests.compiler.conftest import only_graph

_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}


def text(batch: int) -> Tensor:
    return torch.randn(batch, 5, 32)


def unet() -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, lambda batch, size: {
        "sample": torch.randn(batch, 4, size, size),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": text(batch),
    }


def vae() -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    return model, lambda batch, size: {"sample": torch.randn(batch, 3, 2 * size, 2 * size)}


def dit() -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    """Its positions are those of one size."""
    model = diffusers.DiTTransformer2DModel(
        **_HEADS, out_channels=8, num_layers=2, sample_size=8, norm_num_groups=8, num_embeds_ada_norm=10
    )
    return model, lambda batch, size: {
        "hidden_states": torch.randn(batch, 4, 8, 8),
        "timestep": torch.full((batch,), 7),
        "class_labels": torch.randint(0, 10, (batch,)),
    }


def sd3() -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    model = diffusers.SD3Transformer2DModel(
        **_HEADS,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    return model, lambda batch, size: {
        "hidden_states": torch.randn(batch, 4, size, size),
        "encoder_hidden_states": text(batch),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.full((batch,), 7),
    }


def flux() -> tuple[nn.Module, Callable[[int, int], dict[str, Any]]]:
    model = diffusers.FluxTransformer2DModel(
        **_HEADS,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model, lambda batch, size: {
        "hidden_states": torch.randn(batch, size * size, 4),
        "encoder_hidden_states": text(batch),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.full((batch,), 0.7),
        "img_ids": torch.randn(size * size, 3),
        "txt_ids": torch.zeros(5, 3),
    }


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("make", [unet, vae, dit, sd3, flux])
def test_one_graph_gives_the_same(make: Any, compiled: Callable[..., Any]) -> None:
    model, inputs = make()
    fast = compiled(model)
    for batch, size in ((2, 8), (3, 16), (4, 8)):
        given = {**inputs(batch, size), "return_dict": False}
        with torch.no_grad():
            torch.testing.assert_close(fast(**given)[0], model(**given)[0], atol=1e-4, rtol=1e-4)
    assert only_graph().ours["hf_cpu_accel.attention.default"] >= 2
