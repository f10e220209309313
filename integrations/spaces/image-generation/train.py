"""Train the UNet of this folder on scikit-learn's handwritten digits, in some minutes on one core, without a download.

    pip install diffusers scikit-learn tqdm
    python train.py [--steps 1400] [--output unet]

Uses denoising diffusion (Ho et al., 2020) with a cosine schedule and classifier-free guidance. Saves the running mean
of the weights in float16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from drawing import NO_DIGIT, SIZE, WEIGHTS, new_unet, schedule
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import trange

UNLABELED = 0.1  # share of the images that train without their label, for the guidance


def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images, float32 [n, 1, SIZE, SIZE] from -1 to 1, and their digits, int64 [n]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=SIZE, mode="bicubic", align_corners=False).clamp(-1, 1)
    return images, torch.tensor(data.target)


def train(unet: UNet2DModel, steps: int, batch_size: int, learning_rate: float) -> float:
    """Train `unet`, set its weights to their running mean, and return the mean loss of the last hundred steps."""
    images, labels = digits()
    scheduler = DDPMScheduler(**schedule())
    optimizer = torch.optim.AdamW(unet.parameters(), lr=learning_rate)
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    mean = EMAModel(unet.parameters(), decay=0.995, use_ema_warmup=True, power=0.75)
    losses = []
    for _ in (progress := trange(steps)):
        rows = torch.randint(len(images), (batch_size,))
        times = torch.randint(scheduler.config.num_train_timesteps, (batch_size,))
        digit = torch.where(torch.rand(batch_size) < UNLABELED, NO_DIGIT, labels[rows])
        noise = torch.randn(batch_size, 1, SIZE, SIZE)
        noisy = scheduler.add_noise(images[rows], noise, times)
        loss = F.mse_loss(unet(noisy, times, class_labels=digit).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        decay.step()
        mean.step(unet.parameters())
        losses.append(loss.item())
        progress.set_postfix(loss=f"{sum(losses[-100:]) / len(losses[-100:]):.4f}")
    mean.copy_to(unet.parameters())
    return sum(losses[-100:]) / len(losses[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    unet = new_unet()
    loss = train(unet, arguments.steps, arguments.batch_size, arguments.learning_rate)
    unet.half().save_pretrained(arguments.output)
    print(f"loss {loss:.4f}, {unet.num_parameters():,} parameters saved in {arguments.output}")


if __name__ == "__main__":
    main()
