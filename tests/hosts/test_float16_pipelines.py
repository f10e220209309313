"""Pipelines of models with float16 weights, whichever of them are accelerated."""

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline

from hf_cpu_accel import accelerate_for_cpu, restore
from tests.hosts.diffusion_pipelines import stable_diffusion


def _pipeline():
    pipe, call = stable_diffusion()
    pipe.to(torch.float16)
    return pipe, call


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_one_model_among_eager_ones(part):
    pipe, call = _pipeline()
    before = call()
    accelerate_for_cpu(getattr(pipe, part), dtype="float32")
    assert abs(call() - before).max() < 0.02
    restore(getattr(pipe, part))
    assert (call() == before).all()


def test_all_models():
    pipe, call = _pipeline()
    before = call()
    accelerate_for_cpu(pipe, dtype="float32")
    assert pipe.dtype is pipe.unet.dtype is pipe.vae.dtype is torch.float16
    assert abs(call() - before).max() < 0.02
    pipe.to(torch.float16)
    pipe.vae.to(torch.float32)  # as SDXL does around its VAE
    pipe.vae.to(torch.float16)
    assert abs(call() - before).max() < 0.02
    assert (restore(pipe) and call() == before).all()


def test_what_pipelines_call_besides_forward():
    pipe, _ = _pipeline()
    accelerate_for_cpu(pipe, dtype="float32")
    image = torch.rand(1, 3, 32, 32).half()
    latents = pipe.vae.encode(image).latent_dist
    assert latents.sample().dtype is latents.mode().dtype is torch.float16
    for decoded in (
        pipe.vae.decode(latents.mode()).sample,
        pipe.vae.decode(latents.mode(), return_dict=False)[0],
    ):
        assert decoded.dtype is torch.float16
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    (made,) = other("a house", image=image, strength=0.9, num_inference_steps=2, output_type="pt").images
    assert made.dtype is torch.float16
    assert made.isfinite().all()
