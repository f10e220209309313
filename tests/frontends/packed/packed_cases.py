"""Small models of each kind that packed folders hold, with an input and the auto class that loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
_PAIRS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


def tokens() -> torch.Tensor:
    return torch.arange(18).view(2, 9) * 5 % 97 + 2


def _image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))}


def bert() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.BertConfig(**_SIZES, num_labels=3)
    return (
        hf.BertForSequenceClassification(config),
        {"input_ids": tokens()},
        hf.AutoModelForSequenceClassification,
    )


def llama() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    return hf.LlamaForCausalLM(config), {"input_ids": tokens()}, hf.AutoModelForCausalLM


def gpt2() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=1)
    return hf.GPT2LMHeadModel(config), {"input_ids": tokens()}, hf.AutoModelForCausalLM


def mixtral() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4)
    return hf.MixtralForCausalLM(config), {"input_ids": tokens()}, hf.AutoModelForCausalLM


def gpt_oss() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.GptOssConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4, head_dim=32)
    return hf.GptOssForCausalLM(config), {"input_ids": tokens()}, hf.AutoModelForCausalLM


def t5() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=99, decoder_start_token_id=0
    )
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    return hf.T5ForConditionalGeneration(config), inputs, hf.AutoModelForSeq2SeqLM


def whisper() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.WhisperConfig(
        **_PAIRS,
        vocab_size=120,
        num_mel_bins=16,
        max_source_positions=40,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    sound = torch.randn(1, 16, 80, generator=torch.Generator().manual_seed(1))
    inputs = {"input_features": sound, "decoder_input_ids": tokens()[:1]}
    return hf.WhisperForConditionalGeneration(config), inputs, hf.AutoModelForSpeechSeq2Seq


def vit() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.ViTConfig(**{**_SIZES, "image_size": 64, "patch_size": 16})
    return hf.ViTForImageClassification(config), _image(), hf.AutoModelForImageClassification


def siglip() -> tuple[nn.Module, dict[str, Any], Any]:
    """Its head has an `nn.MultiheadAttention`."""
    config = hf.SiglipVisionConfig(**{**_SIZES, "image_size": 64, "patch_size": 16})
    return hf.SiglipVisionModel(config), _image(), hf.SiglipVisionModel


def resnet() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="bottleneck"
    )
    model = hf.ResNetForImageClassification(config)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.uniform_(-0.1, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
            norm.weight.data.uniform_(0.5, 1.5)
            norm.weight.data[3] = 0  # of which the convolution's rows cannot be told again
    return model, _image(), hf.AutoModelForImageClassification


def wav2vec2() -> tuple[nn.Module, dict[str, Any], Any]:
    config = hf.Wav2Vec2Config(
        **{**_SIZES, "vocab_size": 32},
        conv_dim=(64, 64),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    sound = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))
    return hf.Wav2Vec2Model(config), {"input_values": sound}, hf.AutoModel


def mimi() -> tuple[nn.Module, dict[str, Any], Any]:
    """With transposed convolutions, and one whose only feature is the sound."""
    config = hf.MimiConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32, intermediate_size=64,
        codebook_size=32, codebook_dim=16, vector_quantization_hidden_dimension=16, num_filters=16, num_quantizers=4,
        upsampling_ratios=[4, 2], upsample_groups=64, sampling_rate=16000,
    )  # fmt: skip
    codes = torch.randint(0, 32, (1, 4, 9), generator=torch.Generator().manual_seed(1))
    sound = torch.randn(1, 1, 640, generator=torch.Generator().manual_seed(1))
    return hf.MimiModel(config), {"audio_codes": codes, "input_values": sound}, hf.AutoModel


def encodec() -> tuple[nn.Module, dict[str, Any], Any]:
    """With weight norm, which is computed once."""
    config = hf.EncodecConfig(
        target_bandwidths=[40.0], sampling_rate=16000, num_filters=16, hidden_size=32, upsampling_ratios=[4, 2], codebook_size=32,
        codebook_dim=32, num_lstm_layers=1,
    )  # fmt: skip
    sound = torch.randn(1, 1, 640, generator=torch.Generator().manual_seed(1))
    return hf.EncodecModel(config), {"input_values": sound, "audio_codes": None}, hf.AutoModel


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], Any]]] = {
    make.__name__: make
    for make in (
        bert,
        llama,
        gpt2,
        mixtral,
        gpt_oss,
        t5,
        whisper,
        vit,
        siglip,
        resnet,
        wav2vec2,
        mimi,
        encodec,
    )
}
