"""Well-known architectures with random weights, to measure speed without a model hub.

Speed does not depend on the values of the weights. Accuracy does, so measure it on a trained model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_cpu_accel.cli.decoder_shapes import DECODERS, QWEN3_0_6B

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

M = TypeVar("M", bound=nn.Module)

_DEBERTA_V3 = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
# name -> (transformers model type, settings of its published config.json that differ from the defaults)
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-tiny": (
        "bert",
        {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    ),
    "bert-base-uncased": ("bert", {}),
    "bert-large-uncased": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "all-MiniLM-L6-v2": (
        "bert",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "distilbert-base-uncased": ("distilbert", {}),
    "roberta-base": (
        "roberta",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "xlm-roberta-base": (
        "xlm-roberta",
        {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "albert-base-v2": ("albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "electra-small-discriminator": ("electra", {}),
    "mpnet-base": ("mpnet", {"vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
    "deberta-v3-small": ("deberta-v2", {**_DEBERTA_V3, "num_hidden_layers": 6}),
    "deberta-v3-base": ("deberta-v2", _DEBERTA_V3),
    "ModernBERT-base": ("modernbert", {}),
    "mobilebert-uncased": ("mobilebert", {"classifier_activation": False}),
    "conv-bert-base": ("convbert", {}),
    "xlnet-base-cased": (
        "xlnet",
        {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "ff_activation": "gelu"},
    ),
    "roformer_chinese_base": ("roformer", {}),
    "rembert": ("rembert", {}),
    "squeezebert-uncased": ("squeezebert", {}),
    "embeddinggemma-300m": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 2048,
            "use_bidirectional_attention": True,
        },
    ),
    "Qwen3-Embedding-0.6B": (
        "qwen3",
        {**QWEN3_0_6B, "vocab_size": 151669, "max_position_embeddings": 32768},
    ),
    **DECODERS,
    "t5-small": ("t5", {"decoder_start_token_id": 0}),
    "bart-base": (
        "bart",
        {
            "vocab_size": 50265,
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
    ),
}

NAMES = tuple(_ARCHITECTURES)


def config(name: str) -> PreTrainedConfig:
    """Return the configuration of one of `NAMES`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _ARCHITECTURES:
        raise ValueError(f"random_config={name!r} is unknown; accepted: {', '.join(NAMES)}")
    import transformers

    model_type, overrides = _ARCHITECTURES[name]
    # A copy, because the configuration adds entries to its arguments.
    return transformers.AutoConfig.for_model(model_type, **copy.deepcopy(overrides))


def build(
    name: str, auto_class: str = "AutoModel", seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a model of a well-known architecture with random weights, in eval mode.

    Biases and norm weights get noise. They start at exactly 0 and 1, and a bug that drops one would not show.

    Args:
        name: one of `NAMES`.
        auto_class: the transformers auto class that decides the head, such as "AutoModelForMaskedLM".
        seed: seed of the weights.
        dtype: dtype of the weights, which are created in it without a float32 copy.
    """
    shape = config(name)
    import transformers

    head = getattr(transformers, auto_class)
    return seeded(lambda: head.from_config(shape, dtype=dtype), seed)


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """Call `make` with this seed and return its model in eval mode; biases and norm weights get noise as in `build`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()
