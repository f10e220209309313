"""Small models of diffusers, one for each kind of block, besides those of the pipelines in tests/hosts/diffusion_pipelines.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_ROPE = {"axes_dims_rope": (4, 4, 8)}
_TIME = torch.tensor([7])


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ids(tokens: int, axes: int) -> dict[str, Tensor]:
    return {"img_ids": _noise(tokens, axes), "txt_ids": torch.zeros(6, axes)}


_IMAGE = {"hidden_states": _noise(1, 4, 8, 8), "timestep": _TIME}
_GUIDED = {**_IMAGE, "encoder_hidden_states": _noise(1, 6, 32)}
_TOKENS = {**_GUIDED, "hidden_states": _noise(1, 16, 4)}
_VIDEO = {**_GUIDED, "hidden_states": _noise(1, 4, 2, 8, 8)}
_MASK = {"encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool)}

# {name: (class, arguments of the class, arguments of the call)}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        _GUIDED,
    ),
    "autoencoder-dc": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (16, 32),
            "decoder_block_out_channels": (16, 32),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        {"sample": _noise(1, 3, 16, 16)},
    ),
    "autoencoder-oobleck": (
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        {"sample": _noise(1, 2, 256)},
    ),
    "autoencoder-tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": _noise(1, 3, 16, 16)},
    ),
    "autoencoder-wan": (
        "AutoencoderKLWan",
        {
            "base_dim": 16,
            "z_dim": 4,
            "dim_mult": [1, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
        },
        {"sample": _noise(1, 3, 5, 16, 16)},
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            **_HEADS,
            **_ROPE,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 32,
            "approximator_layers": 1,
        },
        {**_TOKENS, **_ids(16, 3)},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 6,
        },
        {**_GUIDED, "hidden_states": _noise(1, 3, 4, 8, 8)},
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            **_HEADS,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "norm_num_groups": 8,
            "num_embeds_ada_norm": 10,
        },
        {**_IMAGE, "class_labels": torch.tensor([3])},
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        {**_TOKENS, **_ids(16, 4), "guidance": torch.ones(1)},
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 32,
        },
        {**_TOKENS, **_MASK, "num_frames": 1, "height": 4, "width": 4},
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 4, 8),
            "axes_lens": (64, 16, 16),
            "cap_feat_dim": 32,
        },
        {**_GUIDED, **_MASK},
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {
            **_HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 16,
            "max_sequence_length": 6,
        },
        {**_VIDEO, **_MASK},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **_HEADS,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_size": 8,
            "caption_channels": 32,
            "use_additional_conditions": False,
        },
        {**_GUIDED, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {
            **_HEADS,
            **_ROPE,
            "in_channels": 4,
            "out_channels": 1,
            "num_layers": 2,
            "joint_attention_dim": 32,
        },
        {
            **_TOKENS,
            "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.bool),
            "img_shapes": [[(1, 4, 4)]],
        },
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 8,
        },
        _GUIDED,
    ),
    "stable-audio": (
        "StableAudioDiTModel",
        {
            **_HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "time_proj_dim": 16,
            "global_states_input_dim": 32,
            "cross_attention_input_dim": 32,
        },
        {
            **_GUIDED,
            "hidden_states": _noise(1, 4, 8),
            "timestep": torch.tensor([0.7]),
            "global_hidden_states": _noise(1, 1, 32),
            "rotary_embedding": (_noise(9, 8), _noise(9, 8)),
        },
    ),
    "unet-attention": (
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "norm_num_groups": 8,
        },
        {"sample": _noise(1, 3, 8, 8), "timestep": _TIME},
    ),
    "vq": (
        "VQModel",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 8,
        },
        {"sample": _noise(1, 3, 16, 16)},
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 16,
            "ffn_dim": 64,
            "num_layers": 2,
        },
        _VIDEO,
    ),
    "z-image": (
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [4, 4, 8],
            "axes_lens": [64, 16, 16],
        },
        {"x": [_noise(4, 1, 8, 8)], "t": torch.tensor([0.5]), "cap_feats": [_noise(6, 32)]},
    ),
}


def build(name: str) -> nn.Module:
    """Build one of `MODELS` with random weights, in eval mode; no parameter is zero everywhere."""
    import diffusers

    kind, options, _ = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, kind)(**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model
