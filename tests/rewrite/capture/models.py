"""Small models whose layers no matcher supports, and layers written for single questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DetrConfig,
    InstructBlipQFormerConfig,
    ParakeetEncoder,
    ParakeetEncoderConfig,
    SegformerConfig,
    SegformerModel,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
)
from transformers.models.detr.modeling_detr import DetrDecoder
from transformers.models.instructblip.modeling_instructblip import InstructBlipQFormerModel

from tests.architectures.models import randomize

Batch = dict[str, Any]
_WIDTHS: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def parakeet() -> nn.Module:
    sizes = {"intermediate_size": 96, "num_mel_bins": 16, "subsampling_conv_channels": 16, "dropout": 0.1}
    return ParakeetEncoder(ParakeetEncoderConfig(**_WIDTHS, **sizes))


def conformer() -> nn.Module:
    """Its attention over relative positions is written out."""
    sizes = {"intermediate_size": 96, "conv_dim": (16,), "conv_stride": (4,), "conv_kernel": (8,)}
    options = {"num_feat_extract_layers": 1, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}
    return Wav2Vec2ConformerModel(Wav2Vec2ConformerConfig(**_WIDTHS, **sizes, **options))


def detr() -> nn.Module:
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    return DetrDecoder(DetrConfig(**sizes))


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [2, 4], "sr_ratios": [4, 2]}
    options = {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    return SegformerModel(SegformerConfig(**sizes, **options))


def qformer() -> nn.Module:
    sizes = {
        "intermediate_size": 96,
        "encoder_hidden_size": 48,
        "vocab_size": 99,
        "cross_attention_frequency": 2,
    }
    return InstructBlipQFormerModel(InstructBlipQFormerConfig(**_WIDTHS, **sizes))


def sound(batch: int, length: int, hidden: int) -> Batch:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - hidden :] = 0
    return {"input_features": torch.randn(batch, length, 16), "attention_mask": mask if hidden else None}


def waves(batch: int, length: int, hidden: int) -> Batch:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - hidden :] = 0
    return {"input_values": torch.randn(batch, length), "attention_mask": mask if hidden else None}


def queries(batch: int, length: int, hidden: int) -> Batch:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - hidden :] = 0
    return {
        "inputs_embeds": torch.zeros(batch, 7, 64),
        "object_queries_position_embeddings": torch.randn(batch, 7, 64),
        "encoder_hidden_states": torch.randn(batch, length, 64),
        "encoder_attention_mask": mask if hidden else None,
        "spatial_position_embeddings": torch.randn(batch, length, 64),
    }


def pixels(batch: int, length: int, hidden: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 4 * length, 8 * length)}


def texts(batch: int, length: int, hidden: int) -> Batch:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - hidden :] = 0
    return {
        "input_ids": torch.randint(99, (batch, length)),
        "query_embeds": torch.randn(batch, 5, 64),
        "attention_mask": torch.cat((torch.ones(batch, 5, dtype=torch.long), mask), 1),
        "encoder_hidden_states": torch.randn(batch, 2 * length, 48),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], Batch]]] = {
    "parakeet": (parakeet, sound),
    "wav2vec2-conformer": (conformer, waves),
    "detr": (detr, queries),
    "segformer": (segformer, pixels),
    "instructblip q-former": (qformer, texts),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    randomize(model)
    return model


class Written(nn.Module):
    """Pre-norm attention that is written out by `attend`, and a feed-forward network: [B, L, 64] -> the same."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64), nn.LayerNorm(64)])
        self.attend = attend

    def forward(self, states: Tensor, bias: Tensor | None = None, flag: Any = None) -> Tensor:
        normed = self.norms[2](self.norms[0](states))
        heads = [
            part(normed).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        attended = self.attend(*heads, bias).transpose(1, 2).flatten(2)
        states = states + functional.dropout(self.output(attended), 0.1, self.training)
        return states + self.down(functional.gelu(self.up(self.norms[1](states))))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, states: Tensor, *args: Any) -> Tensor:
        for layer in self.layers:
            states = layer(states, *args)
        return states
