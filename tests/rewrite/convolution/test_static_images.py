"""dtype="int8-static": int8 images within and between fused blocks, and the parts that stay as in int8."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu, explain, restore
from hf_cpu_accel.ops.chain.reference import steps_in
from hf_cpu_accel.rewrite.convolution.deferred_images import DeferredImages
from hf_cpu_accel.rewrite.convolution.residual_block import FusedResidualBlock
from hf_cpu_accel.rewrite.convolution.static_images import STRUCTURE
from tests.rewrite.convolution.convolution_blocks import with_statistics
from tests.rewrite.convolution.residual_blocks import Block, error, host, image

pytestmark = pytest.mark.usefixtures("ours_serve")


def resnet() -> nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128], depths=[2, 1], layer_type="basic", hidden_act="relu"
    )
    return with_statistics(ResNetModel(config))


def photos(seed: int, count: int = 2, side: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, side, side, generator=generator)


def examples() -> list[Mapping[str, Tensor]]:
    return [{"pixel_values": photos(seed)} for seed in range(3)]


def static(model: nn.Module, **options: Any) -> nn.Module:
    return accelerate_for_cpu(model, dtype="int8-static", calibration=examples(), **options)


def blocks(model: nn.Module) -> list[FusedResidualBlock]:
    return [module for module in model.modules() if isinstance(module, FusedResidualBlock)]


@pytest.mark.parametrize("method", ["min-max", "percentile", "squared-error"])
def test_values_and_the_way_back(method: str) -> None:
    model, pixels = resnet(), photos(7)
    expected = model(pixels).last_hidden_state.detach()
    static(model, static_range=method)
    assert all(block._ranges is not None for block in blocks(model))
    plan = explain(model)
    assert plan.counts()[STRUCTURE] == 8
    assert any("8 of 8 convolutions return int8 images" in note and method in note for note in plan.notes)
    assert plan.dtype == "int8"
    got = model(pixels).last_hidden_state
    assert got.dtype is torch.float32
    assert error(got, expected) <= 0.06
    restore(model)
    assert torch.equal(model(pixels).last_hidden_state, expected)


def test_blocks_are_computed_together_and_in_bytes() -> None:
    model, pixels = static(resnet()), photos(7)
    embedded = model.embedder(pixels)
    assert isinstance(embedded, DeferredImages)
    stages = list(model.encoder.stages)
    last = stages[1](stages[0](embedded))
    assert isinstance(last, DeferredImages)
    assert embedded._tensor is None
    values = last.tensor
    joined = stages[1]._joined
    assert joined is not None
    assert len(joined[0]) == 3
    ranges = [step for step in steps_in(joined[1].layout) if step.range >= 0]
    assert len(ranges) == 7  # all convolutions but the last
    for _ in range(4):  # nothing looks into a call, so none differs
        assert torch.equal(values, model(pixels).last_hidden_state)
    assert values.is_contiguous(memory_format=torch.channels_last)


def test_images_between_are_there_for_who_reads_them() -> None:
    model, pixels = resnet(), photos(7)
    expected = model(pixels, output_hidden_states=True).hidden_states
    static(model)
    got = model(pixels, output_hidden_states=True).hidden_states
    for order in (range(3), reversed(range(3))):
        for number in order:
            assert error(got[number], expected[number]) <= 0.06
        got = model(pixels, output_hidden_states=True).hidden_states


def test_what_is_written_to_after_it_was_read_by_the_next_block() -> None:
    model, pixels = static(resnet()), photos(7)
    expected = model.encoder.stages[0](model.embedder(pixels)).tensor
    embedded = model.embedder(pixels)
    stage = model.encoder.stages[0](embedded)
    embedded.zero_()
    assert error(stage, expected) <= 0.03
    assert not embedded.any()
    again = model.encoder.stages[0](embedded)
    assert not torch.allclose(again.tensor, expected)
    owned = pixels.clone()
    stage = model.encoder.stages[0](model.embedder(owned))
    owned.zero_()
    assert torch.equal(stage.tensor, expected)


def test_what_examples_did_not_show_is_clamped() -> None:
    model, pixels = static(resnet()), photos(7)
    far = model(100 * pixels).last_hidden_state
    assert far.isfinite().all()
    assert far.abs().max() < 20 * model(pixels).last_hidden_state.abs().max()


def test_ranges_that_fit_no_single_example_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = resnet(), photos(7)
    expected = model(pixels).last_hidden_state.detach()
    calls = [*examples(), {"pixel_values": 1000 * photos(3)}]
    accelerate_for_cpu(model, dtype="int8-static", calibration=calls)
    left = [item for item in explain(model).left if item.structure == STRUCTURE]
    assert left
    assert all("quantized at run time" in str(item.reason) for item in left)
    assert error(model(pixels).last_hidden_state, expected) <= 0.06


def test_activations_between_and_hooks() -> None:
    staged = host(*(Block(64, 64) for _ in range(2)))["stage"]
    model, x = nn.ModuleDict({"stages": nn.ModuleList(staged)}).eval(), image(64)

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.parts["stages"]:
                x = functional.silu(stage(x), inplace=True)
            return x

    whole = Through().eval()
    expected = whole(x)
    accelerate_for_cpu(whole, dtype="int8-static", calibration=[x])
    assert error(whole(x), expected) <= 0.06
    seen: list[Tensor] = []
    stages = whole.parts["stages"]
    stages[0].layer.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    assert error(whole(x), expected) <= 0.06
    assert len(seen) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_casts(duplicate: Any) -> None:
    model, pixels = static(resnet()), photos(7)
    expected = model(pixels).last_hidden_state
    other = duplicate(model)
    assert torch.equal(other(pixels).last_hidden_state, expected)
    other.bfloat16()
    got = other(pixels.bfloat16()).last_hidden_state
    assert got.dtype is torch.bfloat16
    assert error(got.float(), expected) <= 0.06


def test_the_same_settings_again_and_others() -> None:
    model, pixels = static(resnet()), photos(7)
    first = model(pixels).last_hidden_state
    accelerate_for_cpu(model, dtype="int8")
    assert blocks(model)[0]._ranges is None
    assert not torch.equal(model(pixels).last_hidden_state, first)


def test_what_has_no_chains_says_so() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    model = BertModel(BertConfig(vocab_size=30, **sizes)).eval()
    ids = torch.arange(12)[None]
    accelerate_for_cpu(model, dtype="int8-static", calibration=[{"input_ids": ids}])
    assert any("no fused chains of convolutions" in note for note in explain(model).notes)


def test_what_is_to_stay_float32_stays() -> None:
    model, pixels = resnet(), photos(7)
    static(model, dtypes={"encoder.stages.0": "float32"})
    assert blocks(model)[1]._ranges is None
    left = {item.name for item in explain(model).left if item.structure == STRUCTURE}
    assert left
    assert any(name.startswith("encoder.stages.0.") for name in left)
    assert not any(name.startswith("encoder.stages.1.") for name in left)
    other = accelerate_for_cpu(resnet(), dtype="int8", dtypes={"encoder.stages.0": "float32"})
    stage, image = model.encoder.stages[0], other.embedder(pixels)
    assert torch.equal(stage(image), other.encoder.stages[0](image))


def test_refusals(tmp_path: Path) -> None:
    model, pixels = resnet(), photos(7)
    expected = model(pixels).last_hidden_state.detach()
    with pytest.raises(ValueError, match="needs calibration="):
        accelerate_for_cpu(model, dtype="int8-static")
    with pytest.raises(ValueError, match="raised an error for batch 0"):
        accelerate_for_cpu(
            model, dtype="int8-static", calibration=[{"pixel_values": torch.zeros(1, 5, 9, 9)}]
        )
    assert not blocks(model)
    assert torch.equal(model(pixels).last_hidden_state, expected)
    static(model)
    with pytest.raises(ValueError, match="packed files contain no calibrated ranges"):
        model.save_pretrained(tmp_path, packed=True)
    assert CPUAccelConfig(dtype="int8-static").static_range == "min-max"
