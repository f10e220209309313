"""Tiny random models of transformers, one per family, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from tests.compiler.family_inputs import (
    VOCABULARY,
    Batch,
    boxes,
    image,
    image_64,
    image_and_text,
    pairs,
    patches_of_sound,
    series,
    sound,
    spectrum,
    text,
    tokens,
    video,
)


@dataclass(frozen=True)
class Family:
    """A model class, its config's settings and its inputs.

    Attributes:
        breaks: what the model does that Dynamo cannot record: then it makes several graphs, and more of them for other sizes.
        sizes: why it makes one graph per size, though not more.
    """

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[int, int], Batch] = text
    breaks: str | None = None
    sizes: str | None = None

    def build(self, seed: int = 0) -> nn.Module:
        """Eval mode. Biases and norms get noise and weights some size, so that a dropped or wrong one shows."""
        torch.manual_seed(seed)
        build: Any = getattr(transformers, self.model)
        model: nn.Module = build(build.config_class(**self.settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 and "A_log" not in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif parameter.ndim == 2 and parameter.std() < 0.05:
                    parameter.mul_(4)
        return model


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
_WINDOW = {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROUTED = {
    **_GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_WHISPER = {
    **{name: size for name, size in _BART.items() if name != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 128,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
_SOUND = {
    **{name: size for name, size in _SIZES.items() if name != "max_position_embeddings"},
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_TWO_TOWERS = {
    "text_config": {**_SIZES, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": _VIT,
    "projection_dim": 32,
}
# transformers copies the config of an encoder-decoder for its cache in each call, which Dynamo of torch 2.11 cannot record.
_COPIES = "copies a config" if torch.__version__.startswith("2.11.") else None

FAMILIES = {
    # Encoders of text
    "bert": Family("BertModel", _SIZES),
    "roberta": Family("RobertaModel", _SIZES),
    "albert": Family("AlbertModel", {**_SIZES, "embedding_size": 32}),
    "distilbert": Family("DistilBertModel", {**_SIZES, "hidden_dim": 128}),
    "electra": Family("ElectraModel", {**_SIZES, "embedding_size": 32}),
    "deberta-v2": Family(
        "DebertaV2Model",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    ),
    "mpnet": Family("MPNetModel", _SIZES),
    "modernbert": Family(
        "ModernBertModel",
        {**_SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
    ),
    "rembert": Family("RemBertModel", {**_SIZES, "input_embedding_size": 32}),
    "roformer": Family("RoFormerModel", {**_SIZES, "embedding_size": 64}),
    "esm": Family("EsmModel", {**_SIZES, "position_embedding_type": "rotary"}),
    "xlnet": Family(
        "XLNetModel", {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    ),
    "fnet": Family("FNetModel", _SIZES, tokens),
    "convbert": Family("ConvBertModel", {**_SIZES, "embedding_size": 64}),
    "squeezebert": Family("SqueezeBertModel", {**_SIZES, "embedding_size": 64}),
    "mobilebert": Family(
        "MobileBertModel",
        {**_SIZES, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    "funnel": Family(
        "FunnelModel",
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 128,
        },
        sizes="positions of a pooled sequence are made in a loop over them",
    ),
    "longformer": Family(
        "LongformerModel", {**_SIZES, "attention_window": 8}, breaks="asks whether any token attends to all"
    ),
    "big-bird": Family("BigBirdModel", {**_SIZES, "attention_type": "original_full"}),
    "canine": Family(
        "CanineModel",
        {**_SIZES, "num_hash_buckets": 64, "local_transformer_stride": 8},
        sizes="local attention loops over chunks",
    ),
    "layoutlm": Family("LayoutLMModel", {**_SIZES, "max_2d_position_embeddings": 64}, boxes),
    # Decoders
    "gpt2": Family("GPT2Model", _GPT),
    "gpt-neo": Family(
        "GPTNeoModel",
        {
            **_SIZES,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "gpt-j": Family("GPTJModel", {**_GPT, "rotary_dim": 8}),
    "gpt-neox": Family("GPTNeoXModel", _SIZES),
    "opt": Family("OPTModel", {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": Family("BloomModel", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": Family("FalconModel", {**_SIZES, "new_decoder_architecture": False, "multi_query": True}),
    "mpt": Family(
        "MptModel", {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
    ),
    "llama": Family("LlamaModel", _GROUPED),
    "mistral": Family("MistralModel", {**_GROUPED, "sliding_window": 8}),
    "mixtral": Family("MixtralModel", _ROUTED),
    "qwen2": Family("Qwen2Model", _GROUPED),
    "qwen3": Family("Qwen3Model", _GROUPED),
    "qwen3-moe": Family("Qwen3MoeModel", _ROUTED),
    "gemma": Family("GemmaModel", _GROUPED),
    "gemma2": Family("Gemma2Model", _WINDOW),
    "gemma3": Family("Gemma3TextModel", _WINDOW),
    "phi": Family("PhiModel", _SIZES),
    "phi3": Family("Phi3Model", _GROUPED),
    "stablelm": Family("StableLmModel", _GROUPED),
    "starcoder2": Family("Starcoder2Model", _GROUPED),
    "cohere": Family("CohereModel", _GROUPED),
    "olmo2": Family("Olmo2Model", _GROUPED),
    "granite": Family("GraniteModel", {**_GROUPED, "residual_multiplier": 0.3}),
    "gpt-oss": Family("GptOssModel", {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": Family(
        "MambaModel",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        tokens,
        sizes="the scan halves the sequence until one token is left",
    ),
    # Encoders with decoders
    "t5": Family("T5Model", _T5, pairs, breaks=_COPIES),
    "t5-gated": Family("T5Model", {**_T5, "feed_forward_proj": "gated-gelu"}, pairs, breaks=_COPIES),
    "bart": Family("BartModel", _BART, pairs, breaks=_COPIES),
    "pegasus": Family("PegasusModel", _BART, pairs, breaks=_COPIES),
    "m2m100": Family("M2M100Model", _BART, pairs, breaks=_COPIES),
    "marian": Family("MarianModel", {**_BART, "decoder_start_token_id": 1}, pairs, breaks=_COPIES),
    "whisper": Family("WhisperModel", _WHISPER, spectrum, breaks=_COPIES),
    # Vision
    "vit": Family("ViTModel", _VIT, image),
    "deit": Family("DeiTModel", _VIT, image),
    "beit": Family("BeitModel", {**_VIT, "use_relative_position_bias": True}, image),
    "dinov2": Family("Dinov2Model", _VIT, image),
    "dinov3": Family("DINOv3ViTModel", _VIT, image),
    "swin": Family(
        "SwinModel",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        image,
    ),
    "convnext": Family("ConvNextModel", {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}, image),
    "resnet": Family(
        "ResNetModel", {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}, image
    ),
    "mobilenet-v2": Family("MobileNetV2Model", {"depth_multiplier": 0.35, "image_size": 32}, image),
    "segformer": Family(
        "SegformerModel",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
        image_64,
    ),
    "mobilevit": Family(
        "MobileViTModel",
        {"image_size": 64, "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 64]},
        image_64,
    ),
    "videomae": Family("VideoMAEModel", {**_VIT, "num_frames": 4}, video),
    "siglip-vision": Family("SiglipVisionModel", _VIT, image),
    # Sound, both, and series
    "wav2vec2": Family("Wav2Vec2Model", _SOUND, sound),
    "hubert": Family("HubertModel", _SOUND, sound),
    "ast": Family(
        "ASTModel",
        {
            **{name: size for name, size in _VIT.items() if name != "image_size"},
            "num_mel_bins": 16,
            "max_length": 40,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        patches_of_sound,
    ),
    "clip": Family("CLIPModel", _TWO_TOWERS, image_and_text),
    "siglip": Family("SiglipModel", _TWO_TOWERS, image_and_text),
    "blip": Family("BlipModel", _TWO_TOWERS, image_and_text),
    "git": Family("GitModel", {**_SIZES, "vision_config": _VIT}, image_and_text),
    "patchtst": Family(
        "PatchTSTModel",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
        },
        series,
    ),
}
