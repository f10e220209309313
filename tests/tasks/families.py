"""Families of vision and speech models besides those that stand for a task, in tiny random form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

from tests.tasks.case import random_model

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_PATCHED = {**_TINY, "image_size": 32, "patch_size": 8}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
_CNN = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_DETECTOR = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_queries": 7,
}
_SOUND = {**_TINY, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


@dataclass(frozen=True)
class Family:
    """A model, what it is called with, and how many of its layers with attention become one call."""

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    whole_layers: int


def _image(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1))}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 4000, generator=torch.Generator().manual_seed(1))}


def _detr() -> Any:
    backbone = tf.ResNetConfig(embedding_size=16, **_CNN, layer_type="basic", out_features=["stage4"])
    return random_model("DetrForObjectDetection", tf.DetrConfig(**_DETECTOR, backbone_config=backbone))


def _dpt() -> Any:
    neck = {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [16, 16], "reassemble_factors": [4, 2]}
    config = tf.DPTConfig(**_PATCHED, **neck, fusion_hidden_size=16)
    return random_model("DPTForDepthEstimation", config)


def _mask2former() -> Any:
    config = tf.Mask2FormerConfig(
        backbone_config=tf.SwinConfig(
            image_size=64,
            embed_dim=16,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=7,
    )
    return random_model("Mask2FormerForUniversalSegmentation", config)


def _qwen2_vl() -> Any:
    rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = tf.Qwen2VLConfig(
        text_config={**_TINY, "num_key_value_heads": 2, "vocab_size": 99, "rope_parameters": rotary},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        bos_token_id=1,
        eos_token_id=2,
    )
    return random_model("Qwen2VLForConditionalGeneration", config)


def _looking() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[5, 92, *[90] * 4, 93, 7, 8]])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 90).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _model(name: str, config: Any) -> Callable[[], Any]:
    return lambda: random_model(name, config)


_SMALL, _LARGER = _image(2, 3, 32, 32), _image(1, 3, 64, 64)
FAMILIES = {
    "DeiT": Family(_model("DeiTModel", tf.DeiTConfig(**_PATCHED)), _SMALL, 2),
    "BEiT": Family(
        _model("BeitModel", tf.BeitConfig(**_PATCHED, use_relative_position_bias=True)), _SMALL, 2
    ),
    "SigLIP": Family(_model("SiglipVisionModel", tf.SiglipVisionConfig(**_PATCHED)), _SMALL, 2),
    "Swin": Family(_model("SwinModel", tf.SwinConfig(**_SWIN, window_size=4)), _LARGER, 4),
    "Swin v2": Family(_model("Swinv2Model", tf.Swinv2Config(**_SWIN, window_size=4)), _LARGER, 4),
    "ConvNeXt": Family(_model("ConvNextModel", tf.ConvNextConfig(**_CNN)), _LARGER, 1),
    "ResNet": Family(_model("ResNetModel", tf.ResNetConfig(embedding_size=16, **_CNN)), _LARGER, 0),
    "DPT": Family(_dpt, _SMALL, 2),
    "DETR": Family(_detr, _LARGER, 4),
    "Mask2Former": Family(_mask2former, _LARGER, 7),
    "Qwen2-VL": Family(_qwen2_vl, _looking, 4),
    "HuBERT": Family(_model("HubertModel", tf.HubertConfig(**_SOUND)), _sound, 2),
    "data2vec": Family(
        _model("Data2VecAudioModel", tf.Data2VecAudioConfig(**_SOUND, conv_pos_kernel_size=3)), _sound, 2
    ),
}
