"""Tiny random encoders of every family whose layers must be fused."""

from __future__ import annotations

import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


def bert(**changes: object) -> nn.Module:
    return tf.BertModel(tf.BertConfig(**{**SIZES, **changes})).eval()


def distilbert() -> nn.Module:
    return tf.DistilBertModel(
        tf.DistilBertConfig(vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=96)
    ).eval()


def bart_encoder() -> nn.Module:
    sizes = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    }
    return (
        tf.BartModel(tf.BartConfig(vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=1, **sizes))
        .eval()
        .encoder
    )


IMAGES = {
    **{name: size for name, size in SIZES.items() if name != "vocab_size"},
    "image_size": 32,
    "patch_size": 8,
}


def vit() -> nn.Module:
    return tf.ViTModel(tf.ViTConfig(**IMAGES)).eval()


def dinov2(value: float = 1e-4) -> nn.Module:
    """Its branches are multiplied by gains, which are tiny where a model has just been made."""
    return tf.Dinov2Model(tf.Dinov2Config(**{**IMAGES, "mlp_ratio": 2, "layerscale_value": value})).eval()


def dinov3() -> nn.Module:
    """Its tables are for patches alone: the tokens before them are not turned."""
    return tf.DINOv3ViTModel(tf.DINOv3ViTConfig(**IMAGES, num_register_tokens=3)).eval()


def pixtral() -> nn.Module:
    """RMS norms, gates, and tables of positions for rows and columns."""
    return tf.PixtralVisionModel(tf.PixtralVisionConfig(**IMAGES)).eval()


def yolos() -> nn.Module:
    """Its layers take no mask."""
    return tf.YolosModel(tf.YolosConfig(**{**IMAGES, "image_size": [32, 32]}, num_detection_tokens=5)).eval()


def t5(**changes: object) -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2, "vocab_size": 99}
    return tf.T5EncoderModel(tf.T5Config(**{**sizes, **changes})).eval()


def modernbert() -> nn.Module:
    """Windows, and a first layer without a first norm."""
    windows = {"local_attention": 4, "global_attn_every_n_layers": 2, "max_position_embeddings": 64}
    return tf.ModernBertModel(tf.ModernBertConfig(**{**SIZES, **windows}, pad_token_id=0)).eval()


def nomic() -> nn.Module:
    return tf.NomicBertModel(tf.NomicBertConfig(**SIZES)).eval()


def eurobert() -> nn.Module:
    return tf.EuroBertModel(tf.EuroBertConfig(**SIZES, pad_token_id=0)).eval()


def esm(kind: str) -> nn.Module:
    return tf.EsmModel(tf.EsmConfig(**SIZES, pad_token_id=0, position_embedding_type=kind)).eval()


def clip_text() -> nn.Module:
    """Causal, by a mask and by an argument."""
    return tf.CLIPTextModel(tf.CLIPTextConfig(**SIZES)).eval()


def hubert() -> nn.Module:
    front = {
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
    }
    return tf.HubertModel(tf.HubertConfig(**SIZES, **front, num_conv_pos_embedding_groups=4)).eval()


def mpnet() -> nn.Module:
    """Attention is written out, and its masks are added."""
    return tf.MPNetModel(tf.MPNetConfig(**SIZES)).eval()


def deberta_v2(**changes: object) -> nn.Module:
    """Vectors of relative positions; distances beyond four share them."""
    settings = {
        "relative_attention": True,
        "position_buckets": 8,
        "max_position_embeddings": 64,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
    }
    torch.manual_seed(0)
    model = tf.DebertaV2Model(tf.DebertaV2Config(**{**SIZES, **settings, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)  # else all attend alike to all
    return model


def whisper_encoder() -> nn.Module:
    """Its queries are scaled before attention, and its keys have no bias."""
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96}
    config = tf.WhisperConfig(
        vocab_size=99,
        d_model=64,
        encoder_layers=2,
        decoder_layers=1,
        num_mel_bins=8,
        pad_token_id=0,
        max_source_positions=20,
        **sizes,
    )
    return tf.WhisperModel(config).eval().encoder


def megatron() -> nn.Module:
    """It could be a decoder's, writes its attention out, and returns attention weights unasked."""
    return tf.MegatronBertModel(tf.MegatronBertConfig(**SIZES)).eval()


def rembert() -> nn.Module:
    return tf.RemBertModel(tf.RemBertConfig(**SIZES, input_embedding_size=32)).eval()


def layoutlm() -> nn.Module:
    """Causal where there is no mask, and by its mask alone where there is one."""
    return tf.LayoutLMModel(tf.LayoutLMConfig(**SIZES)).eval()


def groupvit_text() -> nn.Module:
    """Batches and heads are one dimension of its products."""
    return tf.GroupViTTextModel(tf.GroupViTTextConfig(**SIZES)).eval()


def data2vec_vision() -> nn.Module:
    """Calls torch's attention itself, and passes the size of the image to its layers."""
    return tf.Data2VecVisionModel(tf.Data2VecVisionConfig(**IMAGES)).eval()


def mlcd() -> nn.Module:
    """Its tables have no dimension for the batch."""
    return tf.MLCDVisionModel(tf.MLCDVisionConfig(**IMAGES)).eval()


FUSED = {
    "bert": (bert, 2),
    "distilbert": (distilbert, 2),
    "bart": (bart_encoder, 2),
    "vit": (vit, 2),
    "whisper": (whisper_encoder, 2),
    "dinov2": (dinov2, 2),
    "pixtral": (pixtral, 2),
    "dinov3": (dinov3, 2),
    "yolos": (yolos, 2),
    "t5": (t5, 2),
    "t5 gated": (lambda: t5(feed_forward_proj="gated-gelu"), 2),
    "modernbert": (modernbert, 2),
    "mpnet": (mpnet, 2),
    "nomic": (nomic, 2),
    "eurobert": (eurobert, 2),
    "esm rotary": (lambda: esm("rotary"), 2),
    "esm absolute": (lambda: esm("absolute"), 2),
    "clip text": (clip_text, 2),
    "hubert": (hubert, 2),
    "deberta v3": (deberta_v2, 2),
    "deberta v2": (lambda: deberta_v2(share_att_key=False), 2),
    "deberta, one way": (lambda: deberta_v2(pos_att_type=["c2p"]), 2),
    "deberta, the other way": (lambda: deberta_v2(pos_att_type=["p2c"], share_att_key=False), 2),
    "deberta without buckets": (lambda: deberta_v2(position_buckets=-1), 2),
    "deberta with a convolution": (lambda: deberta_v2(conv_kernel_size=3), 2),
    "megatron": (megatron, 2),
    "rembert": (rembert, 2),
    "layoutlm": (layoutlm, 2),
    "groupvit text": (groupvit_text, 2),
    "data2vec vision": (data2vec_vision, 2),
    "mlcd": (mlcd, 2),
}


def inputs(model: nn.Module) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(1, 2000)}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(2, 8, 40)}
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return {"input_ids": torch.randint(3, 99, (2, 7)), "attention_mask": mask}


def run(model: nn.Module, batch: dict[str, Tensor], **more: object) -> Tensor:
    with torch.no_grad():
        hidden = model(**batch, **more)[0]
    return hidden * batch["attention_mask"][..., None] if "attention_mask" in batch else hidden


def fused_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedEncoderLayer)]
