"""Well-known architectures with random weights, for speed and wiring without a model hub.

Speed does not depend on the values of the weights. Accuracy does: measure that on a trained model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# name -> (transformers model type, what its published config.json sets differently from the type's defaults)
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
    "deberta-v3-small": (
        "deberta-v2",
        {
            "hidden_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
        },
    ),
    "ModernBERT-base": ("modernbert", {}),
}

NAMES = tuple(_ARCHITECTURES)


def build(name: str, auto_class: str = "AutoModel", seed: int = 0) -> PreTrainedModel:
    """A model of a well-known shape in eval mode, float32, random weights from `seed`.

    Biases and norm weights get noise (they start at exactly 0 and 1), so that a dropped one shows.

    Args:
        name: one of `NAMES`.
        auto_class: the transformers auto class that chooses the head, e.g. "AutoModelForMaskedLM".
    """
    if name not in _ARCHITECTURES:
        raise ValueError(f"random_config={name!r} is not known; accepted: {', '.join(NAMES)}")
    import transformers

    model_type, overrides = _ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, auto_class).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.float().eval()
