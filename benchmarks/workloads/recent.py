"""Recent models of text, images and sound: published shapes, or two blocks of the real width, with
random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from hf_cpu_accel.cli import random_models

_WRITTEN = 64  # tokens
_IMAGE_TOKEN, _IMAGE_TOKENS = 49190, 64


def _smolvlm() -> nn.Module:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    text = random_models.config("SmolLM2-135M").to_dict()
    text |= {"vocab_size": 49280, "tie_word_embeddings": False}
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=4,
        image_token_id=_IMAGE_TOKEN,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    model = Idefics3ForConditionalGeneration(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # all write as many tokens
    return model


def _question(batch: int, generator: Generator) -> dict[str, Tensor]:
    """One tile of 512 x 512 and 24 tokens around it for each."""
    words = torch.randint(1000, 49000, (batch, 24), generator=generator)
    image = torch.full((batch, _IMAGE_TOKENS), _IMAGE_TOKEN)
    ids = torch.cat([words[:, :8], image, words[:, 8:]], dim=1)
    pixels = torch.randn(batch, 1, 3, 512, 512, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def _answer(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The ids of the tokens as floats [batch, tokens]: two systems agree fully where they write the same."""
    tokens: Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=_WRITTEN)
    return tokens[:, -_WRITTEN:].float()


def _parakeet() -> nn.Module:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    return ParakeetEncoder(ParakeetEncoderConfig())


def _mel_frames(batch: int, generator: Generator) -> dict[str, Tensor]:
    """10 seconds."""
    frames = torch.randn(batch, 1000, 80, generator=generator)
    return {"input_features": frames, "attention_mask": torch.ones(batch, 1000, dtype=torch.long)}


def _mimi() -> nn.Module:
    from transformers import MimiConfig, MimiModel

    return MimiModel(MimiConfig())


def _sound_and_codes(batch: int, generator: Generator) -> dict[str, Tensor]:
    """4 seconds at 24 kHz, and the codes of 4 seconds: 12.5 frames a second of 32 codebooks, with 8 in use."""
    return {
        "input_values": 0.1 * torch.randn(batch, 1, 4 * 24000, generator=generator),
        "codes": torch.randint(0, 2048, (batch, 8, 50), generator=generator),
    }


def _encoded_and_decoded(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sound [batch, 1, samples] of codes that are always the same: those of two systems may differ where two are as near."""
    codes = model.encode(inputs["input_values"], num_quantizers=8, return_dict=True).audio_codes
    assert codes.shape == inputs["codes"].shape
    sound: Tensor = model.decode(inputs["codes"], return_dict=True).audio_values
    return sound


def _dac() -> nn.Module:
    from transformers import DacConfig, DacModel

    return DacModel(DacConfig(sampling_rate=44100))


def _music_and_codes(batch: int, generator: Generator) -> dict[str, Tensor]:
    """A second at 44.1 kHz, and the codes of a second: 86 frames of 9 codebooks."""
    return {
        "input_values": 0.1 * torch.randn(batch, 1, 44032, generator=generator),
        "codes": torch.randint(0, 1024, (batch, 9, 86), generator=generator),
    }


def _coded_and_played(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sound [batch, samples]; as `_encoded_and_decoded`."""
    codes = model.encode(inputs["input_values"], return_dict=True).audio_codes
    assert codes.shape == inputs["codes"].shape
    sound: Tensor = model.decode(audio_codes=inputs["codes"], return_dict=True).audio_values
    return sound


def _deformable_detr() -> nn.Module:
    from transformers import DeformableDetrConfig, DeformableDetrModel, ResNetConfig

    backbone = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return DeformableDetrModel(DeformableDetrConfig(backbone_config=backbone, **own))


def _photographs(batch: int, generator: Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 640, 640, generator=generator)}


def _beit() -> nn.Module:
    """As it was published: with a bias for each two patches in every layer."""
    from transformers import BeitConfig, BeitModel

    positions = {"use_relative_position_bias": True, "use_absolute_position_embeddings": False}
    model = BeitModel(BeitConfig(**positions, use_mask_token=False), add_pooling_layer=False)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter)
    return model


def _pictures(batch: int, generator: Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=generator)}


def _detected(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[batch, queries or patches, features]"""
    states: Tensor = model(**inputs).last_hidden_state
    return states


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=2)


def _video(batch: int, generator: Generator) -> dict[str, Tensor]:
    """Latents of 17 frames of 256 x 384, 1920 tokens of them, and 512 tokens of text."""
    return {
        "hidden_states": torch.randn(batch, 16, 5, 32, 48, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 512, 4096, generator=generator),
        "timestep": torch.full((batch,), 501),
    }


def _filmed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Maps [batch, channels, frames * height, width]."""
    return first_output(model, inputs).flatten(2, 3)


def _z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(n_layers=2, n_refiner_layers=0)
    for pad in (model.x_pad_token, model.cap_pad_token):  # its constructor leaves them as the memory was
        nn.init.normal_(pad, std=0.02)
    return model


def _latents(batch: int, generator: Generator) -> dict[str, Tensor]:
    """Of images of 512 x 512, and 128 tokens of text."""
    return {
        "latents": torch.randn(batch, 16, 1, 64, 64, generator=generator),
        "t": torch.full((batch,), 0.5),
        "texts": torch.randn(batch, 128, 2560, generator=generator),
    }


def _painted(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Maps [batch, channels, height, width]."""
    output = model(list(inputs["latents"]), inputs["t"], list(inputs["texts"]), return_dict=False)[0]
    return torch.stack(output).squeeze(2)


def first_output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the first output of the model."""
    output: Tensor = model(**inputs)[0]
    return output


# name -> (what makes the model, what makes its inputs for a batch, what answers them)
MODELS: dict[
    str,
    tuple[
        Callable[[], nn.Module],
        Callable[[int, Generator], dict[str, Tensor]],
        Callable[[nn.Module, dict[str, Tensor]], Tensor],
    ],
] = {
    "smolvlm-256m": (_smolvlm, _question, _answer),
    "parakeet-0.6b-encoder": (_parakeet, _mel_frames, first_output),
    "mimi": (_mimi, _sound_and_codes, _encoded_and_decoded),
    "dac": (_dac, _music_and_codes, _coded_and_played),
    "beit-base": (_beit, _pictures, _detected),
    "deformable-detr-r50": (_deformable_detr, _photographs, _detected),
    "wan-1.3b-blocks": (_wan, _video, _filmed),
    "z-image-blocks": (_z_image, _latents, _painted),
}
