"""Packed folders of diffusers' models and pipelines."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DConditionModel, UNet2DModel

from hf_cpu_accel import accelerate_for_cpu, explain

FILE = "diffusion_pytorch_model.safetensors"
pytestmark = pytest.mark.usefixtures("installed")


def network() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
    ).eval()


def answer(model):
    generator = torch.Generator().manual_seed(1)
    image, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 5, 64, generator=generator)
    with torch.no_grad():
        return model(image, 3, text).sample


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_loaded_network_equals_the_saved_one(tmp_path, dtype):
    model = accelerate_for_cpu(network(), dtype=dtype)
    model.save_pretrained(tmp_path, packed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        loaded, info = UNet2DConditionModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert explain(loaded).items == explain(model).items
    assert torch.equal(answer(loaded), answer(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(answer(UNet2DConditionModel.from_pretrained(tmp_path / "again")), answer(model))


def test_a_plain_save_writes_the_original_weights(tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype="int8").save_pretrained(tmp_path)
    after = UNet2DConditionModel.from_pretrained(tmp_path).state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not any(
        torch.equal(model.state_dict()[name], before[name]) for name in ("mid_block.resnets.0.conv1.weight",)
    )


def test_a_changed_or_newer_file_loads_nothing(tmp_path):
    accelerate_for_cpu(network(), dtype="int8").save_pretrained(tmp_path, packed=True)
    content = bytearray((tmp_path / FILE).read_bytes())
    content[-1000] ^= 1
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be loaded.*CRC-32"):
        UNet2DConditionModel.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["format_version"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="format version 2"):
        UNet2DConditionModel.from_pretrained(tmp_path)


def test_a_pipeline_is_saved_and_loaded_as_a_whole(tmp_path):
    network = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pipe = DDPMPipeline(network.eval(), DDPMScheduler(num_train_timesteps=10))
    pipe.set_progress_bar_config(disable=True)
    accelerate_for_cpu(pipe, dtype="int8")
    pipe.save_pretrained(tmp_path, packed=True)
    assert (tmp_path / "unet" / "cpu_accel_config.json").exists()
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert explain(loaded).dtype == "int8"

    def images(pipe):
        return pipe(
            num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
        ).images

    assert (images(loaded) == images(pipe)).all()
