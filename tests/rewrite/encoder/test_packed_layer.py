"""Encoder layers over concatenated sequences: the vision towers of Qwen-VL and similar models."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLVisionConfig
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLVisionBlock

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.encoder.fuse import STRUCTURE
from hf_cpu_accel.rewrite.encoder.packed_layer import FusedPackedLayer, Sequences

_SIZES = {
    "depth": 2,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
TOWERS = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 64, "hidden_size": 32}),
    "qwen2_5_vl": (
        "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel",
        {"hidden_size": 64, "intermediate_size": 96, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionConfig", "Qwen3VLVisionModel",
        {"hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 32, "num_position_embeddings": 64,
         "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip
# Images of 4 x 6 and 8 x 4 patches: sequences, and windows in them, of several lengths; and two that are alike.
GRIDS = {
    "ragged": [[1, 4, 6], [1, 8, 4]],
    "alike": [[1, 4, 4], [1, 4, 4]],
    "one": [[1, 8, 6]],
    "video": [[3, 4, 4]],
}


def tower(name: str) -> nn.Module:
    config, model, sizes = TOWERS[name]
    torch.manual_seed(0)
    package = f"transformers.models.{name}"
    made = getattr(importlib.import_module(f"{package}.configuration_{name}"), config)(**_SIZES, **sizes)
    built: nn.Module = getattr(importlib.import_module(f"{package}.modeling_{name}"), model)(made).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
    return built


@torch.no_grad()
def seen(model: nn.Module, grid: list[list[int]]) -> Tensor:
    tokens = sum(frames * height * width for frames, height, width in grid)
    pixels = torch.randn(tokens, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    states: Tensor = model(pixels, grid_thw=torch.tensor(grid)).last_hidden_state
    return states


@pytest.fixture(scope="module", params=TOWERS)
def towers(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """(eager, accelerated in float32)."""
    eager = tower(request.param)
    return eager, accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_what_is_seen(
    towers: tuple[nn.Module, nn.Module], grid: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, model = towers
    expected = seen(eager, grid)
    layers = [module for module in model.modules() if isinstance(module, FusedPackedLayer)]
    assert len(layers) == 2
    assert sum(item.structure == STRUCTURE and item.reason is None for item in explain(model).items) == 2
    divided, found = FusedPackedLayer._divided, []

    def noted(*call: object) -> object:
        found.append(divided(*call))
        return found[-1]

    monkeypatch.setattr(FusedPackedLayer, "_divided", noted)
    assert row_error(seen(model, grid), expected) <= 1e-4
    assert len(found) >= 2
    assert all(part is not None for part in found)


@pytest.mark.parametrize(("dtype", "similarity"), [("bfloat16", 0.999), ("int8", 0.995)])
def test_reduced_precision_stays_close(dtype: str, similarity: float) -> None:
    model = tower("qwen3_vl")
    expected = seen(model, GRIDS["ragged"])
    accelerate_for_cpu(model, dtype=dtype)
    ours = seen(model, GRIDS["ragged"])
    assert torch.cosine_similarity(ours.flatten(), expected.flatten(), dim=0) >= similarity
    restore(model)
    assert torch.equal(seen(model, GRIDS["ragged"]), expected)


@torch.no_grad()
def test_calls_that_the_op_does_not_do_take_the_own_forward(towers: tuple[nn.Module, nn.Module]) -> None:
    eager, model = towers
    states = torch.randn(12, 64)
    angles = torch.rand(12, 8).repeat(1, 2)
    tables = angles.cos(), angles.sin()
    for ends in ([0, 12], [0, 5, 12], [0, 1, 11, 12]):
        given = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32), "position_embeddings": tables}
        assert row_error(model.blocks[0](states, **given), eager.blocks[0](states, **given)) <= 1e-4
    assert model.blocks[0].accepts(states, **given)
    assert not model.blocks[0].accepts(states, **given, attention_mask=torch.ones(1, 1, 12, 12))
    wrong = {"cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32), "position_embeddings": tables}
    for block in (eager.blocks[0], model.blocks[0]):
        with pytest.raises((RuntimeError, ValueError)):
            block(states, **wrong)


@torch.no_grad()
def test_rows_that_are_a_batch_of_one() -> None:
    """HunYuan's images."""
    config = HunYuanVLVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        _attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    eager = nn.Sequential(HunYuanVLVisionBlock(config)).eval()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    assert isinstance(model[0], FusedPackedLayer)
    states, ends = torch.randn(1, 12, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"cu_seqlens": ends, "attention_mask": None}
    assert model[0].accepts(states, **given)
    assert row_error(model[0](states, **given), eager[0](states, **given)) <= 1e-4


@pytest.mark.parametrize("lengths", [(4, 4), (3, 1, 5), (7,), (2, 0, 2, 3)])
def test_rows_to_a_batch_and_back(lengths: tuple[int, ...]) -> None:
    ends = torch.tensor((0, *lengths)).cumsum(0)
    sequences = Sequences.of(ends)
    rows = torch.randn(sum(lengths), 3)
    batch = sequences.batch(rows)
    assert torch.equal(sequences.rows(batch), rows)
    whole = [length for length in lengths if length]
    for sequence, part in zip(batch, rows.split(whole), strict=True):
        assert torch.equal(sequence[: len(part)], part)
    assert sequences.padding is None or sequences.padding.sum(1).tolist() == whole
