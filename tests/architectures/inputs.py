"""What a model is called with, by its signature, main input and config: guesses, of which the first that works is taken."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.architectures.small import exceptions

BATCH, LENGTH, PADDED = 2, 12, 4
_MODALITIES = ("input_ids", "pixel_values", "input_values", "input_features", "decoder_input_ids", "bbox",
               "pixel_values_videos", "encoder_hidden_states", "inputs_embeds")  # fmt: skip


class Maker:
    """Tensors for the arguments of one model, by their names."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.parameters = {
            name: p
            for name, p in inspect.signature(model.forward).parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }

    def batches(self) -> Iterator[dict[str, Any]]:
        """What the exceptions give for the type, else guesses."""
        given = exceptions().get(self.config.model_type, {}).get("inputs", {})
        if given and set(given) <= set(self.parameters):
            torch.manual_seed(1)
            yield {name: self._value(name) if what is None else _made(what) for name, what in given.items()}
        required = [n for n, p in self.parameters.items() if p.default is p.empty]
        mains = self.model.main_input_name
        mains = [mains] if isinstance(mains, str) else list(mains)
        first = list(dict.fromkeys([*(name for name in mains if name in self.parameters), *required]))
        others = [n for n in _MODALITIES if n in self.parameters and n not in first]
        sets = [first, *([*first, other] for other in others)]
        if not first:
            sets = sets[1:]
        sets.append([*first, *others])
        sets.append([*first, *[n for n in others if n != "inputs_embeds"]])
        for names in sets:
            for shape in self._shapes(names):
                batch = self._batch(names, shape)
                if batch is not None:
                    yield batch

    def _shapes(self, names: list[str]) -> Iterator[tuple[int, ...] | None]:
        """Of images or of sound, whatever the model is given."""
        if any(_is_image(name) for name in names):
            yield from self._image_shapes()
            return
        yield None
        bins = self.find("num_mel_bins", "feature_size", "n_mels", "input_size", "input_dim", default=80)
        time = self.find("max_source_positions", "max_length", "spec_size", default=64)
        if "input_features" in names:
            yield from ((BATCH, 2 * time, bins), (BATCH, 1, 2 * time, bins), (BATCH, bins, 2 * time))
            yield from ((BATCH, 1, 4 * time, bins), (BATCH, bins, 3000), (BATCH, 128, 128), (BATCH, 128, 80))
        if "input_values" in names:
            yield from ((BATCH, 1, 4000), (BATCH, 4000), (1, 1, 4000), (BATCH, time, bins), (BATCH, 2, 4000))

    def _batch(self, names: list[str], shape: tuple[int, ...] | None) -> dict[str, Any] | None:
        torch.manual_seed(1)
        batch = {}
        for name in names:
            takes_shape = _is_image(name) or name in ("input_features", "input_values")
            value = torch.randn(shape) if takes_shape and shape else self._value(name)
            if value is None:
                return None
            batch[name] = value
        if shape is not None and len(shape) == 2:
            batch |= _grids(self.parameters)
        return batch

    def _value(self, name: str) -> Any:
        width = self.find("hidden_size", "d_model", "n_embd", "embed_dim", "dim", default=64)
        vocabulary = self.find("vocab_size", default=100)
        vocabulary = min(vocabulary, 160) if vocabulary > 20 else vocabulary
        low = 5 if vocabulary > 20 else 0
        if name in (
            "input_ids",
            "decoder_input_ids",
            "main_input_ids",
            "target_ids",
            "text_input_ids",
            "phoneme_ids",
        ):
            return torch.randint(
                low, vocabulary, (BATCH, LENGTH if name != "decoder_input_ids" else LENGTH - 4)
            )
        if name in ("grid_thw", "image_grid_thw"):
            return torch.tensor([[1, 4, 4]])
        if name == "hidden_states" and "grid_thw" in self.parameters:
            channels, time = (
                self.find("num_channels", "in_channels", default=3),
                self.find("temporal_patch_size", default=1),
            )
            return torch.randn(16, channels * time * self.find("patch_size", default=8) ** 2)
        if name == "bbox":
            corner = torch.randint(0, 40, (BATCH, LENGTH, 2))
            return torch.cat([corner, corner + torch.randint(1, 20, (BATCH, LENGTH, 2))], -1)
        if name.endswith("features_mask"):
            return torch.ones(BATCH, 2 * self.find("max_source_positions", default=32), dtype=torch.long)
        if name.endswith("attention_mask"):
            return torch.ones(BATCH, LENGTH, dtype=torch.long)
        if name == "input_values":
            channels = self.find("num_mel_bins", default=0)
            return torch.randn(
                BATCH, *((self.find("max_length", default=64), channels) if channels else (4000,))
            )
        if name in ("input_features", "audio_values", "audio_features", "input_audio_embeds"):
            bins = self.find(
                "num_mel_bins",
                "feature_size",
                "n_mels",
                "input_size",
                "input_feat_per_channel",
                "input_dim",
                default=80,
            )
            time = 2 * self.find("max_source_positions", default=32)
            return torch.randn(BATCH, bins, time) if self._bins_first() else torch.randn(BATCH, time, bins)
        if name in (
            "hidden_states",
            "inputs_embeds",
            "encoder_hidden_states",
            "decoder_inputs_embeds",
            "embeddings",
        ):
            cross = self.find("encoder_hidden_size", "cross_attention_hidden_size", default=width)
            return torch.randn(BATCH, LENGTH, cross if name.startswith("encoder") else width)
        if name in ("pixel_position_ids", "image_position_ids"):  # of four by four patches
            return torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, -1, -1)
        if name in ("position_ids", "token_type_ids"):
            return (
                torch.arange(LENGTH)[None].expand(BATCH, -1)
                if name == "position_ids"
                else torch.zeros(BATCH, LENGTH, dtype=torch.long)
            )
        if name in (
            "past_values",
            "past_time_features",
            "past_observed_mask",
            "future_time_features",
            "future_values",
        ):
            return self._series(name)
        if name == "spectrogram":
            return torch.randn(BATCH, 20, self.find("model_in_dim", "num_mel_bins", default=80))
        return None

    def _series(self, name: str) -> Tensor | None:
        length = self.find("context_length", default=16)
        lags = max(self.find_any("lags_sequence", default=[0]) or [0])
        variables = self.find("num_input_channels", "input_size", "num_input_channels", default=1)
        shape = (BATCH, length + lags) if variables == 1 else (BATCH, length + lags, variables)
        features = self.find("num_time_features", default=0)
        if "time_features" in name:
            return torch.randn(
                BATCH,
                length + lags if name.startswith("past") else self.find("prediction_length", default=4),
                features,
            )
        if name == "past_observed_mask":
            return torch.ones(shape)
        if name == "future_values":
            return torch.rand(BATCH, self.find("prediction_length", default=4), *shape[2:])
        return torch.rand(shape)

    def _bins_first(self) -> bool:
        return "max_source_positions" in vars(self.config) or "audio" in type(self.model).__name__.lower()

    def _image_shapes(self) -> Iterator[tuple[int, ...]]:
        size = self.find_any("image_size", "img_size", "input_size", default=32)
        sides = tuple(size) if isinstance(size, list | tuple) and len(size) == 2 else None
        side = sides or ((size, size) if isinstance(size, int) else (32, 32))
        channels = self.find("num_channels", "in_channels", "in_chans", "image_channels", default=3)
        frames = self.find("num_frames", "frames_per_clip", default=4)
        yield BATCH, channels, *side
        yield BATCH, frames, channels, *side
        patch = self.find("patch_size", "spatial_patch_size", default=8)
        time = self.find("temporal_patch_size", default=1)
        yield 16, channels * time * patch * patch
        yield BATCH, 1, channels, *side
        yield BATCH, channels, frames, *side
        for other in (64, 128, 224, 256):
            yield BATCH, channels, other, other
        yield BATCH, 16, channels * patch * patch
        yield BATCH, 2, channels, 64, 64

    def find(self, *names: str, default: int) -> int:
        value = self.find_any(*names, default=default)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if type(value) is int else default

    def find_any(self, *names: str, default: Any) -> Any:
        for name in names:
            for config in nested(self.config):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default


def _made(what: Any) -> Any:
    """A value that an exception describes. {"shape": sides} is random numbers; with "value" that number everywhere; with "below"
    ids, or numbers from 0, under it; with "middle": [id, count] so many of an id (an image's) behind where padding ends.
    A list of numbers is a tensor, a list or a dictionary of descriptions one of what they describe, and else it is the value."""
    if isinstance(what, list):
        return [_made(inner) for inner in what] if isinstance(what[0], dict) else torch.tensor(what)
    if not isinstance(what, dict):
        return what
    shape, below = what.get("shape"), what.get("below")
    if shape is None:
        return {name: _made(inner) for name, inner in what.items()}
    if "value" in what:
        made = torch.full(shape, what["value"])
    elif below is not None:
        made = torch.randint(3, below, shape) if type(below) is int else below * torch.rand(shape)
    else:
        made = torch.randn(shape)
    if "middle" in what:
        token, count = what["middle"]
        made[:, PADDED : PADDED + count] = token
    return made


def nested(config: Any) -> Iterator[Any]:
    from transformers import PretrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from nested(value)


def _is_image(name: str) -> bool:
    return name in ("pixel_values", "pixel_values_videos", "pixel_values_images", "images", "patches")


def _grids(parameters: dict[str, Any]) -> dict[str, Tensor]:
    grid = torch.tensor([[1, 4, 4]])
    return {n: grid for n in ("grid_thw", "image_grid_thw") if n in parameters}


def padded(batch: dict[str, Any], model: Any) -> dict[str, tuple[dict[str, Any], Tensor]]:
    """{side: (batch, tokens bool [B, L])} for a model of text that takes an attention mask."""
    takes = "attention_mask" in inspect.signature(model.forward).parameters
    ids = batch.get("input_ids")
    if not takes or ids is None or ids.dim() != 2 or ids.shape[1] <= PADDED:
        return {}
    if len(ids) != BATCH:  # the ids of one text, or a row of each codebook: a mask has others
        return {}
    pad = getattr(model.config, "pad_token_id", None)
    pad = pad if type(pad) is int and 0 <= pad < 160 else 0
    made = {}
    for side in ("right", "left"):
        mask = torch.ones(ids.shape, dtype=torch.long)
        mask[1, -PADDED:] = 0
        mask = mask if side == "right" else mask.flip(1)
        made[side] = (
            {**batch, "input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask},
            mask.bool(),
        )
    return made
