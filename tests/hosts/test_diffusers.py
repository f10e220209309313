"""Pipelines and models of diffusers: found, accelerated in place, the same images, and back again."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.frontends import import_hook
from hf_cpu_accel.hosts.find import find
from tests.hosts.diffusion_pipelines import PIPELINES, stable_diffusion, unet


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """In dB, of images in [0, 1]."""
    return -10 * np.log10(np.square(image - reference).mean() + 1e-12)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_the_same_images_and_comes_back(name):
    pipe, call = PIPELINES[name]()
    models = {part: model for part, model in pipe.components.items() if isinstance(model, torch.nn.Module)}
    before = call()
    assert accelerate_for_cpu(pipe, dtype="float32") is pipe
    assert all(getattr(pipe, part) is model for part, model in models.items())
    np.testing.assert_allclose(call(), before, atol=2e-4)
    np.testing.assert_array_equal(call(), call())
    assert {item.name.split(".")[0] for item in explain(pipe).replaced} == set(models)
    restore(pipe)
    np.testing.assert_array_equal(call(), before)


@pytest.mark.parametrize("name", ["stable_diffusion", "stable_diffusion_3", "flux"])
def test_bfloat16_images_are_close(name):
    pipe, call = PIPELINES[name]()
    before = call()
    accelerate_for_cpu(pipe, dtype="bfloat16")
    assert psnr(call(), before) >= 35


def test_a_bfloat16_pipeline_stays_one():
    pipe, call = stable_diffusion()
    size = 16 // pipe.vae_scale_factor
    # Given: torch 2.11 draws other numbers in bfloat16 than in float32.
    latents = torch.randn(
        1, pipe.unet.config.in_channels, size, size, generator=torch.Generator().manual_seed(0)
    )
    before = call(latents=latents)
    pipe.to(torch.bfloat16)
    accelerate_for_cpu(pipe)
    assert pipe.dtype is pipe.unet.dtype is torch.bfloat16
    assert psnr(call(latents=latents.bfloat16()), before) >= 35


def test_a_refused_cast_leaves_the_pipeline_as_it_was():
    pipe, call = stable_diffusion()
    accelerate_for_cpu(pipe, dtype="float32")
    before = call()
    for cast in (pipe.to, pipe.text_encoder.to):
        with pytest.raises(RuntimeError, match="only to float32 or bfloat16"):
            cast(torch.float16)
    np.testing.assert_array_equal(call(), before)


def test_sizes_batches_and_steps_are_free():
    pipe, call = stable_diffusion()
    changes = [
        {"height": 32, "width": 16},
        {"num_images_per_prompt": 3},
        {"num_inference_steps": 5, "guidance_scale": 1.0},
        {"height": 16, "width": 24, "prompt": ["a red house", "a house"]},
        {},
    ]
    before = [call(seed=number, **change) for number, change in enumerate(changes)]
    accelerate_for_cpu(pipe, dtype="float32")
    for number, change in enumerate(changes):
        np.testing.assert_allclose(call(seed=number, **change), before[number], atol=2e-4)


def test_callbacks_are_called_and_may_stop_the_loop():
    pipe, call = stable_diffusion()
    accelerate_for_cpu(pipe)
    steps = []

    def stop_after_two(pipe, step, timestep, tensors):
        steps.append((step, tuple(tensors["latents"].shape)))
        pipe._interrupt = step == 1
        return tensors

    call(num_inference_steps=4, callback_on_step_end=stop_after_two)
    assert steps[:2] == [(0, (1, 4, 8, 8)), (1, (1, 4, 8, 8))]


def test_skip_modules_names_components():
    pipe, _ = stable_diffusion()
    accelerate_for_cpu(pipe, dtype="float32", skip_modules=["vae", "unet.mid_block.*"])
    kept = {item.name for item in explain(pipe).replaced}
    assert any(name.startswith("unet.down_blocks") for name in kept)
    assert not any(name.startswith(("vae", "unet.mid_block")) for name in kept)
    with pytest.raises(ValueError, match=r"'vea' matches no module"):
        accelerate_for_cpu(pipe, skip_modules=["vea"])


def test_roots_are_the_models_under_their_components_names():
    pipe, _ = stable_diffusion()
    assert {root.name: root.module for root in find(pipe)} == {
        "vae": pipe.vae,
        "text_encoder": pipe.text_encoder,
        "unet": pipe.unet,
    }
    (root,) = find(pipe.unet)
    assert (root.module, root.host, root.name) == (pipe.unet, "diffusers", "")


def test_pipelines_may_share_models():
    pipe, _ = stable_diffusion()
    accelerate_for_cpu(pipe, dtype="float32")
    packed = explain(pipe.unet)
    other = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    accelerate_for_cpu(other, dtype="float32")
    assert explain(pipe.unet) == packed
    restore(other)
    assert not explain(pipe).replaced


def test_training_mode_is_refused_and_nothing_is_touched():
    pipe, _ = stable_diffusion()
    pipe.unet.train()
    with pytest.raises(ValueError, match="training mode"):
        accelerate_for_cpu(pipe)
    assert not explain(pipe).replaced


def _add_to_weights(model, scale):
    """What fusing an adapter does, without peft, which the suite lacks."""
    for number, module in enumerate(model.modules()):
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            change = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(number))
            module.weight.data += scale * 0.02 * change


def test_fused_adapters_are_in_the_images(monkeypatch):
    pipe, call = stable_diffusion()
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "fuse_lora", _add_to_weights)
    before = call()
    pipe.unet.fuse_lora(1.0)
    fused = call()
    assert np.abs(fused - before).max() > 0.01
    pipe.unet.fuse_lora(-1.0)
    accelerate_for_cpu(pipe, dtype="float32", skip_modules=["vae", "unet.mid_block"])
    plan = explain(pipe)
    pipe.unet.fuse_lora(1.0)
    assert explain(pipe) == plan
    np.testing.assert_allclose(call(), fused, atol=2e-4)
    pipe.unet.fuse_lora(-1.0)
    np.testing.assert_allclose(call(), before, atol=2e-4)
    restore(pipe)
    assert "fuse_lora" not in vars(pipe.unet)
    np.testing.assert_allclose(call(), before, atol=2e-4)


class _Adapter(torch.nn.Module):
    """What peft puts in the place of a linear, named as there."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = torch.nn.Linear(linear.in_features, 4, bias=False)
        self.lora_B = torch.nn.Linear(4, linear.out_features, bias=False)
        self.merged = False

    def forward(self, input):
        output = self.base_layer(input)
        return output if self.merged else output + self.lora_B(self.lora_A(input))

    def merge(self):
        self.base_layer.weight.data += self.lora_B.weight @ self.lora_A.weight
        self.merged = True


def _put_adapters(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ("q_proj", "v_proj"):
                setattr(parent, name, _Adapter(child).eval())


def test_adapters_of_text_encoders_are_in_the_images_and_can_be_fused(monkeypatch):
    pipe, call = stable_diffusion()
    monkeypatch.setattr(type(pipe.text_encoder), "add_adapter", _put_adapters, raising=False)
    before = call()
    accelerate_for_cpu(pipe, dtype="float32")
    pipe.text_encoder.add_adapter()
    assert any(item.name.startswith("text_encoder") for item in explain(pipe).replaced)
    adapted = call()
    assert np.abs(adapted - before).max() > 1e-3
    for module in pipe.text_encoder.modules():
        if isinstance(module, _Adapter):
            module.merge()  # as diffusers' `fuse_lora` of a pipeline does it: without a call of the model
    np.testing.assert_allclose(call(), adapted, atol=2e-4)
    restore(pipe)
    np.testing.assert_allclose(call(), adapted, atol=2e-4)


def test_adapters_need_the_original_weights():
    model = unet()
    accelerate_for_cpu(model, dtype="bfloat16", originals="drop")
    with pytest.raises(RuntimeError, match="originals='drop'"):
        model.fuse_lora()
    assert explain(model).replaced


def test_packed_weights_are_not_written_to_unnoticed():
    model = unet()
    accelerate_for_cpu(model, dtype="float32")
    for layer in (model.conv_in, model.time_embedding.linear_1):
        with pytest.raises(RuntimeError, match="read-only"):
            layer.weight.data += 1
        with torch.no_grad(), pytest.raises(RuntimeError, match="read-only"):
            layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="cannot load a state_dict"):
        model.load_state_dict(unet().state_dict())


@pytest.fixture
def installed():
    import_hook.install()
    yield
    import_hook.install()


@pytest.mark.usefixtures("installed")
def test_the_keyword_loads_and_accelerates(tmp_path):
    pipe, call = stable_diffusion()
    before = call()
    pipe.save_pretrained(tmp_path)
    plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
    assert not explain(plain).replaced
    for loader in (diffusers.DiffusionPipeline, diffusers.AutoPipelineForText2Image):
        fast = loader.from_pretrained(tmp_path, safety_checker=None, cpu_optimize="float32")
        assert type(fast) is type(pipe)
        assert explain(fast).dtype == "float32"
        fast.set_progress_bar_config(disable=True)
        arguments = {"prompt": "a small house", "height": 16, "width": 16, "num_inference_steps": 2}
        images = fast(**arguments, output_type="np", generator=torch.Generator().manual_seed(0)).images
        np.testing.assert_allclose(images, before, atol=2e-4)
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path, subfolder="unet", cpu_optimize=True)
    assert explain(model).replaced


@pytest.mark.usefixtures("installed")
def test_uninstalling_takes_the_keyword_back(tmp_path):
    unet().save_pretrained(tmp_path)
    import_hook.uninstall()
    assert "cpu_optimize" not in str(diffusers.ModelMixin.from_pretrained.__code__.co_varnames)
    model = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    assert not explain(model).replaced
