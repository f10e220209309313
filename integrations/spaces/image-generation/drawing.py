"""Draw digits with a UNet: the model, the denoising loop, and its limits."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DModel
from PIL import Image
from torch import Tensor

from hf_cpu_accel.serve.comparison import Comparison, Pair, compare_calls

WEIGHTS = Path(__file__).parent / "unet"
SIZE = 16
DIGITS = 10
NO_DIGIT = DIGITS  # the class of images without a label
GUIDANCE = 2.0
MOST_STEPS = 50
MOST_IMAGES = 16


def new_unet() -> UNet2DModel:
    """Return a UNet with random weights, conditioned on the digit."""
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=16,
        norm_num_groups=8,
        num_class_embeds=DIGITS + 1,
    )


def load() -> UNet2DModel:
    """Load the UNet with the weights that `train.py` wrote."""
    return UNet2DModel.from_pretrained(WEIGHTS, torch_dtype=torch.float32).eval()


def schedule() -> dict[str, object]:
    """Return the noise schedule of training and drawing."""
    return {"num_train_timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"}


@torch.inference_mode()
def draw(unet: UNet2DModel, digit: int, count: int, steps: int, seed: int) -> Tensor:
    """Draw `count` images of `digit`, float32 [count, SIZE, SIZE] from 0 to 1 (ink).

    Uses classifier-free guidance (Ho and Salimans, 2022): each step moves away from the unconditional prediction.

    Raises:
        ValueError: a digit, a number of images or steps, or a seed outside of the limits.
    """
    _check("digit", digit, 0, DIGITS - 1)
    _check("number of images", count, 1, MOST_IMAGES)
    _check("number of steps", steps, 1, MOST_STEPS)
    _check("seed", seed, 0, 2**31 - 1)
    scheduler = DDIMScheduler(**schedule())
    scheduler.set_timesteps(steps)
    images = torch.randn(count, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    labels = torch.tensor([digit] * count + [NO_DIGIT] * count)
    for step in scheduler.timesteps:
        conditional, unconditional = unet(torch.cat([images] * 2), step, class_labels=labels).sample.chunk(2)
        noise = unconditional + GUIDANCE * (conditional - unconditional)
        images = scheduler.step(noise, step, images).prev_sample
    return (images[:, 0] / 2 + 0.5).clamp(0, 1)


def measure(pair: Pair[UNet2DModel], digit: int, count: int, steps: int, seed: int) -> Comparison:
    """Measure the time to draw these images."""
    return compare_calls(
        lambda: draw(pair.eager, digit, count, steps, seed),
        lambda: draw(pair.accelerated, digit, count, steps, seed),
        amount=count,
        unit="images",
        rounds=2,
    )


def sheet(images: Tensor, width: int = 96) -> Image.Image:
    """Return the images side by side, at most four in a row, each `width` pixels wide, dark on white."""
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    page = Image.new("L", (columns * width, rows * width), "white")
    for number, image in enumerate(images):
        pixels = (255 * (1 - image)).round().to(torch.uint8).numpy()
        picture = Image.fromarray(pixels).resize((width, width), Image.Resampling.BICUBIC)
        page.paste(picture, (number % columns * width, number // columns * width))
    return page


def _check(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"The {name} is {value!r}; enter a whole number from {least} to {most}.")
