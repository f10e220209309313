"""Prompts, and what `generate` answers to each of them alone."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.generate.decoders import END, VOCABULARY


def texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens."""
    chosen = random.Random(seed)
    return [text(chosen.randint(1, longest), seed=chosen.random()) for _ in range(count)]


def text(length: int, seed: float = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, VOCABULARY) for _ in range(length)]


def alone(model: Any, ids: list[int], tokens: int, **settings: Any) -> list[int]:
    """The new tokens of `generate`; greedy unless `settings` say otherwise."""
    inputs = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": END, **settings}
    outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)
    return outputs[0, len(ids) :].tolist()
