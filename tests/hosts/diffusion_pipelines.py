"""Tiny random pipelines of diffusers, each with a call that gives images [B, H, W, 3] as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

Call = Callable[..., np.ndarray]

_WORDS = ["a", "small", "red", "house"]
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def tokenizer() -> CLIPTokenizer:
    vocabulary = {f"{word}</w>": number for number, word in enumerate(_WORDS)}
    letters = sorted(set("".join(_WORDS)))
    for symbol in (*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"):
        vocabulary.setdefault(symbol, len(vocabulary))
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=8)


def text_encoder(cls: Any = CLIPTextModel) -> Any:
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=32,
        max_position_embeddings=8,
    )
    return cls(config).eval()


def unet(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
        **changes,
    }
    return diffusers.UNet2DConditionModel(**config).eval()


def vae(**changes: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        **changes,
    ).eval()


def _parts() -> dict[str, Any]:
    return {
        "unet": unet(),
        "vae": vae(),
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        "safety_checker": None,
        "feature_extractor": None,
    }


def picture(size: int = 16) -> torch.Tensor:
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(3))


def _caller(pipe: DiffusionPipeline, **defaults: Any) -> Call:
    pipe.set_progress_bar_config(disable=True)

    def call(seed: int = 0, **given: Any) -> np.ndarray:
        arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", **defaults, **given}
        return pipe(generator=torch.Generator().manual_seed(seed), **arguments).images

    return call


def stable_diffusion() -> tuple[DiffusionPipeline, Call]:
    pipe = diffusers.StableDiffusionPipeline(**_parts())
    return pipe, _caller(pipe, prompt="a small house", height=16, width=16)


def image_to_image() -> tuple[DiffusionPipeline, Call]:
    pipe = diffusers.StableDiffusionImg2ImgPipeline(**_parts())
    return pipe, _caller(pipe, prompt="a red house", image=picture(), strength=0.9)


def inpaint() -> tuple[DiffusionPipeline, Call]:
    pipe = diffusers.StableDiffusionInpaintPipeline(**_parts())
    mask = (picture()[:, :1] > 0.5).float()
    return pipe, _caller(pipe, prompt="a house", image=picture(), mask_image=mask, height=16, width=16)


def controlnet() -> tuple[DiffusionPipeline, Call]:
    parts = _parts()
    net = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(16, 32))
    for number, parameter in enumerate(net.parameters()):  # its last layers begin as zeros
        if not parameter.any():
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    pipe = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=net.eval())
    return pipe, _caller(pipe, prompt="a house", image=picture(), height=16, width=16)


def stable_diffusion_xl() -> tuple[DiffusionPipeline, Call]:
    model = unet(
        cross_attention_dim=64,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        use_linear_projection=True,
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        unet=model,
        vae=vae(),
        text_encoder=text_encoder(),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    return pipe, _caller(pipe, prompt="a small red house", height=16, width=16)


def stable_diffusion_3() -> tuple[DiffusionPipeline, Call]:
    transformer = diffusers.SD3Transformer2DModel(
        **_HEADS,
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        vae=vae(shift_factor=0.06),
        text_encoder=text_encoder(CLIPTextModelWithProjection),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection),
        text_encoder_3=None,
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        tokenizer_3=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    pipe.tokenizer_max_length = 8
    return pipe, _caller(pipe, prompt="a red house", height=16, width=16)


def flux() -> tuple[DiffusionPipeline, Call]:
    transformer = diffusers.FluxTransformer2DModel(
        **_HEADS,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = diffusers.FluxPipeline(
        transformer=transformer.eval(),
        vae=vae(shift_factor=0.06),
        text_encoder=text_encoder(),
        text_encoder_2=None,
        tokenizer=tokenizer(),
        tokenizer_2=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    embeds = {"prompt_embeds": torch.randn(1, 6, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
    return pipe, _caller(pipe, **embeds, height=16, width=16)


PIPELINES = {
    make.__name__: make
    for make in (
        stable_diffusion,
        image_to_image,
        inpaint,
        controlnet,
        stable_diffusion_xl,
        stable_diffusion_3,
        flux,
    )
}
