"""What people do with pipelines from one call to the next: few steps, guidance, other sizes, callbacks, image prompts."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.hosts.diffusion_pipelines import (
    image_to_image,
    picture,
    stable_diffusion,
    stable_diffusion_xl,
    unet,
)


def latent_consistency():
    """The guidance is an embedding of its scale, so one batch for each image."""
    pipe, _ = stable_diffusion()
    model = unet(time_cond_proj_dim=16)
    pipe = diffusers.LatentConsistencyModelPipeline(
        **{**pipe.components, "unet": model, "scheduler": diffusers.LCMScheduler()},
        requires_safety_checker=False,
    )
    return pipe, {"num_inference_steps": 2, "original_inference_steps": 50, "guidance_scale": 8.0}


def turbo():
    pipe, _ = stable_diffusion()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler(timestep_spacing="trailing")
    return pipe, {"num_inference_steps": 1, "guidance_scale": 0.0}


def turbo_xl():
    pipe, _ = stable_diffusion_xl()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler(timestep_spacing="trailing")
    return pipe, {"num_inference_steps": 1, "guidance_scale": 0.0}


def lcm_scheduler():
    pipe, _ = stable_diffusion()
    pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    return pipe, {"num_inference_steps": 4, "guidance_scale": 1.0}


def plain():
    return stable_diffusion()[0], {"num_inference_steps": 2}


def draw(pipe, seed=0, **arguments):
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "a small house", "height": 16, "width": 16, "output_type": "np", **arguments}
    return pipe(generator=torch.Generator().manual_seed(seed), **given).images


CHANGES = (
    {},
    {"seed": 1},
    {"guidance_scale": 5.0, "negative_prompt": "red"},
    {"guidance_scale": 1.5, "num_images_per_prompt": 2},
    {"prompt": ["a house", "a red house"], "negative_prompt": ["red", "small"], "guidance_scale": 3.0},
    {"num_inference_steps": 3},
    {"height": 24, "width": 8},
    {},
)


@pytest.mark.parametrize(
    "make", [latent_consistency, turbo, turbo_xl, lcm_scheduler, plain], ids=lambda make: make.__name__
)
def test_calls_that_differ_from_the_one_before(make):
    torch.manual_seed(0)
    pipe, defaults = make()
    changes = CHANGES
    if make is latent_consistency:  # knows no negative prompts
        changes = [
            {key: value for key, value in change.items() if key != "negative_prompt"} for change in CHANGES
        ]
    expected = [draw(pipe, **{**defaults, **change}) for change in changes]
    np.testing.assert_array_equal(expected[0], expected[-1])
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    accelerate_for_cpu(pipe, dtype="float32", threads=1)
    images = [draw(pipe, **{**defaults, **change}) for change in changes]
    for ours, theirs, change in zip(images, expected, changes, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-4, err_msg=str(change))
    np.testing.assert_array_equal(images[0], images[-1])
    restore(pipe)
    np.testing.assert_array_equal(draw(pipe, **defaults), expected[0])


def test_an_interrupted_call_ends_where_the_original_does():
    pipe, _ = plain()

    def run():
        seen = []

        def stop(pipe, step, timestep, tensors):
            seen.append((step, int(timestep), tensors["latents"].clone()))
            pipe._interrupt = step == 1
            return tensors

        return draw(pipe, num_inference_steps=4, callback_on_step_end=stop), seen

    expected, theirs = run()
    whole = draw(pipe, num_inference_steps=4)
    assert np.abs(expected - whole).max() > 1e-3
    accelerate_for_cpu(pipe, dtype="float32")
    given, ours = run()
    np.testing.assert_allclose(given, expected, atol=2e-4)
    assert [seen[:2] for seen in ours] == [seen[:2] for seen in theirs]
    torch.testing.assert_close(ours[-1][2], theirs[-1][2], atol=2e-4, rtol=2e-4)
    np.testing.assert_allclose(draw(pipe, num_inference_steps=4), whole, atol=2e-4)


def test_callbacks_may_change_what_the_next_step_sees():
    """Guidance that is switched off half-way: the batch is halved in the middle of a call."""
    pipe, _ = plain()

    def halve(pipe, step, timestep, tensors):
        if step == 1:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        tensors["latents"] = tensors["latents"] * 0.99
        return tensors

    arguments = {
        "num_inference_steps": 4,
        "callback_on_step_end": halve,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    }
    expected = draw(pipe, **arguments)
    accelerate_for_cpu(pipe, dtype="float32")
    np.testing.assert_allclose(draw(pipe, **arguments), expected, atol=2e-4)


def test_strength_changes_the_number_of_steps_of_an_image_to_image_call():
    pipe, call = image_to_image()
    given = [{"strength": strength, "num_inference_steps": 5} for strength in (0.3, 1.0, 0.5)]
    expected = [call(**arguments) for arguments in given]
    accelerate_for_cpu(pipe, dtype="float32")
    for arguments, theirs in zip(given, expected, strict=True):
        np.testing.assert_allclose(call(**arguments), theirs, atol=2e-4)


def _image_prompts():
    """A pipeline that takes image prompts once it has an IP-Adapter."""
    torch.manual_seed(0)
    pipe, _ = stable_diffusion()
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    pipe.register_modules(
        image_encoder=CLIPVisionModelWithProjection(config).eval(),
        feature_extractor=CLIPImageProcessor(size=16, crop_size=16),
    )
    return pipe


def _ip_adapter(model, tokens=4, width=32):
    """A checkpoint for `model` in the form of the original IP-Adapter's."""
    cross = model.config.cross_attention_dim
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(shape, generator=generator) * 0.1

    layers, number = {}, 1
    for name in model.attn_processors:
        if "attn2" in name:
            features = model.get_submodule(name.removesuffix(".processor")).to_q.out_features
            for part in ("to_k_ip", "to_v_ip"):
                layers[f"{number}.{part}.weight"] = values(features, cross)
            number += 2
    projection = {
        "proj.weight": values(cross * tokens, width),
        "proj.bias": values(cross * tokens),
        "norm.weight": torch.ones(cross),
        "norm.bias": torch.zeros(cross),
    }
    return {"image_proj": projection, "ip_adapter": layers}


IMAGE_PROMPT_STEPS = (
    ("load", lambda pipe: pipe.load_ip_adapter(_ip_adapter(pipe.unet), subfolder=None, weight_name="")),
    ("scale", lambda pipe: pipe.set_ip_adapter_scale(0.3)),
    ("off", lambda pipe: pipe.set_ip_adapter_scale(0.0)),
    ("more images", lambda pipe: pipe.set_ip_adapter_scale(1.0)),
    ("unload", lambda pipe: pipe.unload_ip_adapter()),
)


def _with_image_prompts(accelerated_before):
    """The images after each step, and what the last plan said of attention."""
    pipe, images, plan = _image_prompts(), [], None
    for number, (name, step) in enumerate(IMAGE_PROMPT_STEPS):
        if number == accelerated_before:
            accelerate_for_cpu(pipe, dtype="float32", threads=1)
        step(pipe)
        given = {} if name == "unload" else {"ip_adapter_image": picture()}
        images.append(draw(pipe, num_inference_steps=2, **given)[0])
        plan = explain(pipe)
    restore(pipe)
    return [*images, draw(pipe, num_inference_steps=2)[0]], plan


@pytest.fixture(scope="module")
def image_prompted():
    return _with_image_prompts(None)[0]


@pytest.mark.parametrize("first", range(len(IMAGE_PROMPT_STEPS)))
def test_ip_adapters_come_and_go_before_and_after_accelerating(first, image_prompted):
    assert np.abs(image_prompted[0] - image_prompted[2]).max() > 0.01
    images, plan = _with_image_prompts(first)
    for ours, theirs in zip(images, image_prompted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    np.testing.assert_array_equal(images[-1], image_prompted[-1])
    served = [
        item for item in plan.replaced if item.structure == "attention" and item.name.startswith("unet")
    ]
    assert len(served) == 8


def test_what_is_left_in_training_mode_and_drops_nothing_is_no_reason_to_refuse():
    pipe = _image_prompts()
    IMAGE_PROMPT_STEPS[0][1](pipe)
    modes = {name: module.training for name, module in pipe.unet.named_modules()}
    assert any(modes.values())  # so diffusers leaves the processors
    accelerate_for_cpu(pipe, dtype="float32")
    assert not any(module.training for module in pipe.unet.modules())
    restore(pipe)
    assert {name: module.training for name, module in pipe.unet.named_modules()} == modes
    pipe.unet.mid_block.attentions[0].dropout = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"its module 'mid_block.attentions.0.dropout' is in training mode"):
        accelerate_for_cpu(pipe)
