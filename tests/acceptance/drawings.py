"""Drawings of shapes, and a diffusion pipeline and classifiers that learnt them within seconds.

Trained weights have what random ones lack: channels that matter more than others, and outputs that fill their range.
"""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = 16
NOISE = 0.5  # of the images that are to be classified: enough that many are hard to tell
SHAPES = ("disc", "square", "cross", "ring")


def draw(count: int, seed: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Colored shapes on colored grounds: [count, 3, 16, 16] in [-1, 1] without noise, and which shape each is, [count]."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    kind = torch.randint(len(SHAPES), (count,), generator=generator)
    across = torch.linspace(-1, 1, SIZE).expand(count, SIZE, SIZE)
    x, y = (axis - uniform(-0.3, 0.3, 1, 1) for axis in (across, across.mT))
    radius, width = uniform(0.3, 0.6, 1, 1), 0.15
    reach, distance = torch.maximum(x.abs(), y.abs()), torch.hypot(x, y)
    inside = torch.stack(
        [
            radius - distance,
            radius * 0.9 - reach,
            torch.minimum(radius - reach, width - torch.minimum(x.abs(), y.abs())),
            width - (radius - distance).abs(),
        ],
        dim=1,
    )
    coverage = (inside[torch.arange(count), kind] * SIZE / 2 + 0.5).clamp(0, 1)[:, None]
    shape, ground = uniform(0.2, 1, 3, 1, 1), uniform(-1, -0.2, 3, 1, 1)
    images = ground + (shape - ground) * coverage
    return images + noise * torch.randn(images.shape, generator=generator), kind


def artist() -> diffusers.DiffusionPipeline:
    """A pipeline whose UNet learnt to draw such shapes: diffusion on the image itself."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=SIZE,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    pipe = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def loss(step: int) -> Tensor:
        images, _ = draw(16, seed=step)
        noise, times = torch.randn_like(images), torch.randint(1000, (16,))
        return functional.mse_loss(unet(pipe.scheduler.add_noise(images, noise, times), times).sample, noise)

    _train(unet, loss, steps=60)
    return pipe


def classifier(make: Callable[[], nn.Module]) -> nn.Module:
    """`make()`, a model for images that gives `logits`, which learnt to tell the shapes apart."""
    torch.manual_seed(0)
    model = make()

    def loss(step: int) -> Tensor:
        images, kinds = draw(32, seed=step, noise=NOISE)
        return functional.cross_entropy(model(images).logits, kinds)

    _train(model, loss, steps=200)
    return model


def _train(model: nn.Module, loss: Callable[[int], Tensor], steps: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of this size gain nothing from more
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    torch.set_num_threads(threads)
