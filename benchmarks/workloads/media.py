"""Models of images and sound, and one that finds names in texts: published architectures with random weights, each on inputs of
its usual size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.workloads import recent, span_tagger
from hf_cpu_accel.cli import random_models


def _transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(), **options)
    return made


def _whisper_encoder() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        WhisperConfig(d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048)
    )


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def _vae_decoder() -> nn.Module:
    from benchmarks.vae_decoder import VaeDecoder

    return VaeDecoder(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        sample_size=512,
    )


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=12,
        joint_attention_dim=768,
        axes_dims_rope=(8, 28, 28),
    )


def _random(batch: int, generator: Generator, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(batch, *shape, generator=generator) for name, shape in shapes.items()}


def _unet_inputs(batch: int, generator: Generator) -> dict[str, Tensor]:
    noise = _random(batch, generator, sample=(4, 64, 64), encoder_hidden_states=(77, 768))
    return {**noise, "timestep": torch.full((batch,), 501)}


def _flux_inputs(batch: int, generator: Generator) -> dict[str, Tensor]:
    """Latents of 64 x 64 in patches of 2 x 2, 128 tokens of text; the positions are those that its pipeline gives."""
    texts = {"encoder_hidden_states": (128, 768), "pooled_projections": (768,)}
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    return {
        **_random(batch, generator, hidden_states=(1024, 64), **texts),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1),
        "txt_ids": torch.zeros(128, 3),
    }


_IMAGE = partial(_random, pixel_values=(3, 224, 224))
# name -> (what makes the model, what makes its inputs for a batch)
_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, Generator], dict[str, Tensor]]]] = {
    "vit-base": (partial(_transformers, "ViTModel", "ViTConfig", add_pooling_layer=False), _IMAGE),
    "clip-vit-b32": (partial(_transformers, "CLIPVisionModel", "CLIPVisionConfig"), _IMAGE),
    "swin-t": (partial(_transformers, "SwinModel", "SwinConfig", add_pooling_layer=False), _IMAGE),
    "resnet-50": (partial(_transformers, "ResNetModel", "ResNetConfig"), _IMAGE),
    "convnext-t": (partial(_transformers, "ConvNextModel", "ConvNextConfig"), _IMAGE),
    "levit-128": (partial(_transformers, "LevitModel", "LevitConfig"), _IMAGE),
    "regnet-y-040": (partial(_transformers, "RegNetModel", "RegNetConfig"), _IMAGE),
    "poolformer-s12": (partial(_transformers, "PoolFormerModel", "PoolFormerConfig"), _IMAGE),
    "whisper-base-encoder": (_whisper_encoder, partial(_random, input_features=(80, 3000))),  # 30 s
    "wav2vec2-base": (
        partial(_transformers, "Wav2Vec2Model", "Wav2Vec2Config"),
        partial(_random, input_values=(5 * 16000,)),
    ),
    "sd15-unet": (_unet, _unet_inputs),
    "sd15-vae-decoder": (_vae_decoder, partial(_random, latents=(4, 64, 64))),
    "flux-mini": (_flux, _flux_inputs),
    "gliner-base": (span_tagger.build, span_tagger.inputs),
    **{name: (build, inputs) for name, (build, inputs, _) in recent.MODELS.items()},
}

NAMES = tuple(_MODELS)


@dataclass(frozen=True)
class Media:
    """One of `NAMES`, whose first output is the answer, on `batch` images, sounds or steps of diffusion."""

    name: str
    batch: int

    def build(self) -> nn.Module:
        """The float32 eager model; the same weights in every process."""
        return random_models.seeded(_MODELS[self.name][0])

    def inputs(self, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
        """Random numbers, and steps and positions as they are in use; the same for the same seed."""
        return _MODELS[self.name][1](self.batch, torch.Generator().manual_seed(seed))

    def forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
        """[hidden states [batch, tokens, features], maps [batch, channels, height, width], sound [batch, 1, samples], or ids of
        tokens [batch, tokens]], without gradients."""
        answer = recent.MODELS[self.name][2] if self.name in recent.MODELS else recent.first_output
        with torch.inference_mode():
            return [answer(model, inputs)]

    def real_tokens(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """All of them are. Rows of maps are their pixels or their channels, whichever are longer: a row of few values, all next
        to zero, has no direction to compare."""
        return [_rows(output) for output in outputs]


def _rows(output: Tensor) -> Tensor:
    flat = output.flatten(2) if output.ndim == 4 else output
    return flat.mT if output.ndim == 4 and flat.shape[1] > flat.shape[2] else flat


def media(name: str) -> Media | None:
    """`MODEL:BATCH` with a model of `NAMES`, e.g. `vit-base:1`; None if it is something else."""
    match = re.fullmatch(r"([^:]+):([1-9]\d*)", name)
    return Media(match[1], int(match[2])) if match and match[1] in NAMES else None
