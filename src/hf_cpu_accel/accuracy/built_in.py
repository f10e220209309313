"""Built-in examples for a model: random token ids, smooth images, and tones, which are closer to real inputs than noise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.accuracy.calls import Call, named_call
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal

_COUNT = 4
_TOKENS, _LONGEST = 64, 512
_SAMPLES, _RATE = 16_000, 16_000
_IMAGE = 224
# Names of the inputs of transformers models, in the order in which they are tried.
_IDS, _IMAGES, _SOUND, _SPECTRUM = "input_ids", "pixel_values", "input_values", "input_features"
_OF_DECODER = "decoder_input_ids"


def takes_ids(model: nn.Module) -> bool:
    """Return whether the main input of the model is token ids; a SentenceTransformer may have other inputs."""
    return getattr(model, "main_input_name", _IDS) == _IDS


def built_in_calls(model: nn.Module) -> list[Call]:
    """Return calls of a model with random token ids, smooth images or tones, for the arguments of its forward.

    Raises:
        ValueError: the model accepts none of these inputs.
    """
    names = set(inspect.signature(model.forward).parameters)
    for combination in _combinations(model, names):
        calls = [_call(model, combination, seed) for seed in range(_COUNT)]
        if not isinstance(call_foreign(calls[0], model), Refusal):
            return calls
    raise ValueError(
        f"accuracy: no built-in examples fit {type(model).__name__}: pass examples=[...], a list of dicts of inputs, tensors or "
        "tuples of tensors"
    )


def _combinations(model: nn.Module, names: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the combinations of inputs to try, those with the main input of the model first."""
    main = getattr(model, "main_input_name", None)
    candidates = [name for name in (_IDS, _IMAGES, _SPECTRUM, _SOUND) if name in names]
    candidates.sort(key=lambda name: name != main)
    for first in candidates:
        yield (first,)
        if _OF_DECODER in names:
            yield first, _OF_DECODER
    if len(candidates) > 1:
        yield tuple(candidates)


def _call(model: nn.Module, names: tuple[str, ...], seed: int) -> Call:
    return named_call(model, {name: _input(name, model, seed) for name in names}, f"built-in example {seed}")


def _input(name: str, model: nn.Module, seed: int) -> Tensor:
    """Return the built-in input with this name."""
    config = getattr(model, "config", None)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    if name in (_IDS, _OF_DECODER):
        return _ids(model, config, 8 if name == _OF_DECODER else _TOKENS, generator)
    if name == _IMAGES:
        return _image(config, generator).to(dtype)
    if name == _SOUND and _field(config, "num_mel_bins") is None:
        return _sound(generator)[None].to(dtype)
    return _spectrum(config, generator).to(dtype)


def _ids(model: nn.Module, config: Any, length: int, generator: torch.Generator) -> Tensor:
    """Return random token ids, int64 [1, length]; in published vocabularies the special tokens have the first ids."""
    words = _field(config, "vocab_size") or next(
        m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)
    )
    longest = _field(config, "max_position_embeddings") or _LONGEST
    low = 1000 if words > 2000 else min(4, words - 1)
    return torch.randint(
        low, words, (1, min(length, longest - 4 if longest > 8 else longest)), generator=generator
    )


def _image(config: Any, generator: torch.Generator) -> Tensor:
    """Return an image, float32 [1, channels, height, width]: interpolated random colors with a little noise."""
    side = _field(config, "image_size") or _IMAGE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = _field(config, "num_channels") or 3
    colors = torch.randn(1, channels, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(colors, (height, width), mode="bicubic")
    return smooth + 0.05 * torch.randn(smooth.shape, generator=generator)


def _sound(generator: torch.Generator) -> Tensor:
    """Return a second of audio, float32 [samples]: a rising tone with overtones and noise, with variance 1."""
    time = torch.arange(_SAMPLES) / _RATE
    pitch = 100 + 200 * torch.rand((), generator=generator)
    phase = 2 * math.pi * (pitch * time + 60 * time**2)
    tone = sum(torch.sin(part * phase) / part for part in (1, 2, 3, 5))
    audio = tone * (1 + torch.sin(2 * math.pi * 4 * time)) + 0.1 * torch.randn(_SAMPLES, generator=generator)
    return (audio - audio.mean()) / audio.std()


def _spectrum(config: Any, generator: torch.Generator) -> Tensor:
    """Return a smooth log spectrogram, float32 [1, bands, frames] for Whisper, [1, frames, bands] for other models."""
    bands = next(
        (
            b
            for n in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
            if (b := _field(config, n))
        ),
        80,
    )
    frames = 2 * (_field(config, "max_source_positions") or 0)
    first = bool(frames) and hasattr(config, "num_mel_bins")
    shape = (bands, frames) if first else (_field(config, "max_length") or 256, bands)
    rough = torch.randn(1, 1, 12, 12, generator=generator)
    return torch.nn.functional.interpolate(rough, shape, mode="bicubic")[0] * 0.5


def _field(config: Any, name: str) -> Any:
    """Return a field of the config or of its inner configs; None if none has it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    inner = (getattr(config, part, None) for part in ("text_config", "vision_config", "backbone_config"))
    return next((field for part in inner if (field := getattr(part, name, None)) is not None), None)
