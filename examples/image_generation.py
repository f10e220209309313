"""Generate an image with a diffusion pipeline, eager and accelerated; compare pixels and times.

python examples/image_generation.py                         # downloads Stable Diffusion 1.5; minutes on few cores
python examples/image_generation.py --model google/ddpm-cifar10-32 --steps 20
python examples/image_generation.py --random-config         # offline: random weights, an image of noise
"""

from __future__ import annotations

import argparse
import inspect
import time

import numpy as np
import torch
from diffusers import DDIMPipeline, DDIMScheduler, DiffusionPipeline, UNet2DModel
from PIL.Image import Image

from hf_cpu_accel import accelerate_for_cpu

MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"


def random_painter() -> DiffusionPipeline:
    """Return a pipeline of a small UNet with random weights, for images of 32 x 32 pixels."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    return DDIMPipeline(unet.eval(), DDIMScheduler())


def paint(pipe: DiffusionPipeline, prompt: str, steps: int) -> tuple[Image, float]:
    """Return the image of the random seed 0, and the seconds that it took; warm up with one step."""
    inputs = {"prompt": prompt} if "prompt" in inspect.signature(pipe.__call__).parameters else {}
    pipe(**inputs, num_inference_steps=1, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    output = pipe(**inputs, num_inference_steps=steps, generator=torch.Generator().manual_seed(0))
    return output.images[0], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Image generation, eager and accelerated.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder of a diffusion pipeline")
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--dtype", default="auto", help="a dtype of accelerate_for_cpu")
    parser.add_argument("--prompt", default="a small red house by the sea, watercolor")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--output", help="PNG file for the accelerated image")
    options = parser.parse_args()

    pipe = random_painter() if options.random_config else DiffusionPipeline.from_pretrained(options.model)
    pipe.set_progress_bar_config(disable=True)
    eager_image, eager_seconds = paint(pipe, options.prompt, options.steps)
    accelerate_for_cpu(pipe, dtype=options.dtype)
    image, seconds = paint(pipe, options.prompt, options.steps)
    if options.output:
        image.save(options.output)

    difference = np.abs(np.asarray(image, np.float32) - np.asarray(eager_image, np.float32))
    print(f"{'':12} {'seconds':>8} {'speedup':>8}  agreement")
    print(f"{'eager':12} {eager_seconds:8.2f}")
    print(
        f"{'accelerated':12} {seconds:8.2f} {eager_seconds / seconds:7.2f}x"
        f"  pixels differ by {difference.mean():.2f} of 255 on average, {difference.max():.0f} at most"
    )


if __name__ == "__main__":
    main()
