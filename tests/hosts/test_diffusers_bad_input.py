"""What pipelines of diffusers are handed by mistake, or at the edge of what they take: they answer and fail as without us."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu
from tests.hosts.diffusion_pipelines import (
    controlnet,
    flux,
    image_to_image,
    inpaint,
    picture,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
)


def half_a_file():
    """An image that is found out when its pixels are read."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(file, "PNG")
    return PIL.Image.open(io.BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))


BAD = {
    stable_diffusion: {
        "a size that is no multiple of eight": {"height": 30},
        "no size": {"height": 0, "width": 0},
        "zero steps": {"num_inference_steps": 0},
        "fewer than zero steps": {"num_inference_steps": -1},
        "more steps than were trained": {"num_inference_steps": 1001},
        "no prompt": {"prompt": None},
        "a number for a prompt": {"prompt": 7},
        "no prompts": {"prompt": []},
        "an empty prompt": {"prompt": ""},
        "no images": {"num_images_per_prompt": 0},
        "latents of three channels": {"latents": torch.zeros(1, 3, 8, 8)},
        "latents of an odd size": {"latents": torch.zeros(1, 4, 7, 5)},
        "latents that are not finite": {"latents": torch.full((1, 4, 8, 8), torch.nan)},
    },
    image_to_image: {
        "an odd size": {"image": picture(19)},
        "grey": {"image": picture()[:, :1]},
        "one pixel": {"image": picture(1)},
        "no image": {"image": None},
        "no strength": {"strength": 0.0},
        "too much strength": {"strength": 1.5},
        "four channels": {"image": torch.rand(1, 4, 16, 16)},
        "not finite": {"image": torch.full((1, 3, 16, 16), torch.inf)},
        "beyond black and white": {"image": 1e4 * picture()},
        "bytes": {"image": (255 * picture()).byte()},
        "two images for one prompt": {"image": torch.rand(2, 3, 16, 16)},
        "the grey of a file": {"image": PIL.Image.new("L", (16, 16), 7)},
        "a file with transparency": {"image": PIL.Image.new("RGBA", (16, 16))},
        "a file of an odd size": {"image": PIL.Image.new("RGB", (17, 9))},
        "half a file": {"image": half_a_file()},
        "a path": {"image": "/no/such/file.png"},
    },
    inpaint: {
        "a mask of another size": {"mask_image": torch.ones(1, 1, 5, 7)},
        "no mask": {"mask_image": None},
        "a mask of three channels": {"mask_image": picture()},
        "an empty mask": {"mask_image": torch.zeros(1, 1, 16, 16)},
        "half a file": {"image": half_a_file()},
    },
    controlnet: {
        "a hint of another size": {"image": picture(24)},
        "no hint": {"image": None},
        "a hint of four channels": {"image": torch.rand(1, 4, 16, 16)},
        "half a file": {"image": half_a_file()},
    },
    stable_diffusion_xl: {
        "a size that is no multiple of eight": {"width": 20},
        "no steps": {"num_inference_steps": 0},
        "embeddings without the pooled ones": {"prompt": None, "prompt_embeds": torch.zeros(1, 8, 64)},
        "latents of three channels": {"latents": torch.zeros(1, 3, 8, 8)},
        "steps that end before they begin": {"denoising_end": 0.0},
    },
    stable_diffusion_3: {
        "an odd size": {"height": 17},
        "no size": {"height": 0, "width": 0},
        "more than the positions": {"height": 128, "width": 128},
        "no steps": {"num_inference_steps": 0},
        "layers that are not there": {"skip_guidance_layers": [7]},
    },
    flux: {
        "an odd size": {"height": 17, "width": 19},
        "no size": {"height": 0, "width": 0},
        "no steps": {"num_inference_steps": 0},
        "no pooled embeddings": {"pooled_prompt_embeds": None},
        "embeddings of another batch": {"prompt_embeds": torch.zeros(2, 6, 32)},
        "no words": {"prompt_embeds": torch.zeros(1, 0, 32)},
    },
}


def outcome(call, **given):
    """The images, or what was raised."""
    try:
        with torch.no_grad():
            return call(**given)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_pipelines_answer_and_fail_as_before(make):
    pipe, call = make()
    before = {name: outcome(call, **given) for name, given in BAD[make].items()}
    assert any(isinstance(theirs, tuple) for theirs in before.values())
    for dtype, tolerance in (("float32", 2e-4), ("int8", 0.2)):
        accelerate_for_cpu(pipe, dtype=dtype, threads=1)
        for name, given in BAD[make].items():
            ours, theirs = outcome(call, **given), before[name]
            if isinstance(theirs, tuple):
                assert ours == theirs, name
            else:
                np.testing.assert_allclose(ours, theirs, atol=tolerance, err_msg=name)


def test_what_only_our_linears_see_is_refused_in_their_words():
    pipe, call = stable_diffusion()
    accelerate_for_cpu(pipe, dtype="float32", threads=1)
    with pytest.raises(RuntimeError, match="input must be float32 or bfloat16"):
        call(latents=torch.zeros(1, 4, 8, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="the last dimension must be 32"):
        call(prompt=None, prompt_embeds=torch.zeros(1, 8, 31), guidance_scale=1.0)
    _, call = accelerated(stable_diffusion_3)
    with pytest.raises(RuntimeError, match=r"expected \[batch, 4, ...\]"):
        call(latents=torch.zeros(1, 3, 8, 8))
    _, call = accelerated(flux)
    with pytest.raises(ValueError, match="in_features"):
        call(latents=torch.zeros(1, 4, 15))


def accelerated(make):
    pipe, call = make()
    accelerate_for_cpu(pipe, dtype="float32", threads=1)
    return pipe, call
