"""What models of each kind are called with: texts, images, sound, series."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 120
Batch = dict[str, Tensor]


def text(batch: int, length: int) -> Batch:
    """Token ids [batch, length], the last two of the first row padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    if length > 2:
        mask[0, -2:] = 0
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, length)), "attention_mask": mask}


def tokens(batch: int, length: int) -> Batch:
    """Token ids alone."""
    return {"input_ids": torch.randint(5, VOCABULARY, (batch, length))}


def pairs(batch: int, length: int) -> Batch:
    """Token ids [batch, length] for the encoder, and half as many for the decoder."""
    decoder = torch.randint(5, VOCABULARY, (batch, length // 2 + 1))
    return {**text(batch, length), "decoder_input_ids": decoder}


def boxes(batch: int, length: int) -> Batch:
    """Tokens with their places on a page."""
    corners = torch.randint(0, 50, (batch, length, 2))
    return {**text(batch, length), "bbox": torch.cat([corners, corners + 10], dim=-1)}


def image(batch: int, length: int) -> Batch:
    """Pixels [batch, 3, 32, 32]; models fix the size of an image."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def image_64(batch: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 64, 64)}


def video(batch: int, length: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 4, 3, 32, 32)}


def image_and_text(batch: int, length: int) -> Batch:
    return {**tokens(batch, length), **image(batch, length)}


def sound(batch: int, length: int) -> Batch:
    """Samples [batch, 160 * length]."""
    return {"input_values": torch.randn(batch, 160 * length)}


def spectrum(batch: int, length: int) -> Batch:
    return {
        "input_features": torch.randn(batch, 8, 40),
        "decoder_input_ids": tokens(batch, length)["input_ids"],
    }


def patches_of_sound(batch: int, length: int) -> Batch:
    return {"input_values": torch.randn(batch, 40, 16)}


def series(batch: int, length: int) -> Batch:
    return {"past_values": torch.randn(batch, 32, 3)}
