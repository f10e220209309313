"""Tiny random models of every family that must be accelerated, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 120
_SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
_BERT = {**_SMALL, "intermediate_size": 128, "max_position_embeddings": 64}
_ROBERTA = {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}
_DEBERTA = {
    **_BERT,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
    "pooler_hidden_size": 64,
}
_BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Family:
    """A model class, its config, and how many modules of each structure must be replaced."""

    model: str
    config: str
    settings: dict[str, object]
    counts: dict[str, int]

    def make_config(self) -> transformers.PreTrainedConfig:
        config: transformers.PreTrainedConfig = getattr(transformers, self.config)(**self.settings)
        return config

    def build(self, config: transformers.PreTrainedConfig | None = None, seed: int = 0) -> nn.Module:
        """Eval mode. Biases and norms get noise and linears some weight, so that a dropped or wrong one shows."""
        torch.manual_seed(seed)
        build: Callable[[object], nn.Module] = getattr(transformers, self.model)
        model = build(self.make_config() if config is None else config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.weight.std() < 0.05:
                    module.weight.mul_(4)
        return model.eval()

    def run(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The first output: hidden states [B, L, H], or logits."""
        with torch.no_grad():
            if self.model == "BartModel":
                return model.encoder(**batch)[0]
            return model(**batch)[0]


_BLOCKS = {
    "embeddings": 1,
    "encoder layer": 2,
    "attention": 2,
    "merged projections": 6,
    "linear + residual + norm": 4,
    "linear + activation": 2,
}
_POOLED = {**_BLOCKS, "first token: linear + activation": 1}

FAMILIES = {
    "bert": Family("BertModel", "BertConfig", _BERT, _POOLED),
    "minilm": Family("BertModel", "BertConfig", {**_BERT, "hidden_size": 96, "num_attention_heads": 12}, _POOLED),
    "bert-mlm": Family(
        "BertForMaskedLM", "BertConfig", _BERT, {**_BLOCKS, "linear + activation + norm": 1, "linear (shared weight)": 1}
    ),
    "roberta": Family("RobertaModel", "RobertaConfig", _ROBERTA, _POOLED),
    "xlm-roberta": Family("XLMRobertaModel", "XLMRobertaConfig", _ROBERTA, _POOLED),
    "electra": Family("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 32}, {**_BLOCKS, "linear": 1}),
    "distilbert": Family(
        "DistilBertModel", "DistilBertConfig",
        {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 128, "vocab_size": VOCABULARY},
        {"embeddings": 1, "encoder layer": 2, "attention": 2, "merged projections": 8, "ffn": 4},
    ),
    "mpnet": Family(
        "MPNetModel", "MPNetConfig", {**_BERT, "pad_token_id": 1},
        {"embeddings": 1, "encoder layer": 2, "merged projections": 8, "linear + activation": 2, "linear + residual + norm": 2,
         "first token: linear + activation": 1},
    ),
    "albert": Family(
        "AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 32},
        {"embeddings": 1, "encoder layer": 1, "attention": 1, "merged projections": 4, "linear": 4},
    ),
    "deberta": Family(
        "DebertaModel", "DebertaConfig", _DEBERTA,
        {"recorded layer": 2, "layer norm": 1, "merged projections": 6, "linear + activation": 2, "linear + residual + norm": 4},
    ),
    "deberta-v2": Family(
        "DebertaV2Model", "DebertaV2Config", {**_DEBERTA, "position_buckets": 16},
        {"encoder layer": 2, "merged projections": 10, "linear + activation": 2, "linear + residual + norm": 4},
    ),
    "deberta-v3": Family(
        "DebertaV2Model", "DebertaV2Config",
        {**_DEBERTA, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        {"encoder layer": 2, "merged projections": 6, "linear + activation": 2, "linear + residual + norm": 4},
    ),
    "modernbert": Family(
        "ModernBertModel", "ModernBertConfig",
        {**_SMALL, "intermediate_size": 96, "max_position_embeddings": 64, "local_attention": 8, "num_hidden_layers": 3,
         "global_attn_every_n_layers": 3, "pad_token_id": 0},
        {"embeddings": 1, "encoder layer": 3, "attention": 3, "merged projections": 6, "linear": 6},
    ),
    "t5": Family(
        "T5EncoderModel", "T5Config", _T5,
        {"encoder layer": 2, "attention": 2, "rms norm": 5, "merged projections": 8, "ffn": 4},
    ),
    "t5-gated": Family(
        "T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"},
        {"encoder layer": 2, "attention": 2, "rms norm": 5, "merged projections": 12, "linear": 2},
    ),
    "umt5": Family(
        "UMT5EncoderModel", "UMT5Config", _T5,
        {"encoder layer": 2, "attention": 2, "rms norm": 5, "merged projections": 12, "linear": 2},
    ),
    "nomic": Family(
        "NomicBertModel", "NomicBertConfig", _BERT,
        {"embeddings": 1, "encoder layer": 2, "attention": 2, "merged projections": 12, "linear": 2},
    ),
    "eurobert": Family(
        "EuroBertModel", "EuroBertConfig", {**_BERT, "pad_token_id": 0},
        {"encoder layer": 2, "attention": 2, "rms norm": 5, "merged projections": 12, "linear": 2},
    ),
    "esm": Family(
        "EsmModel", "EsmConfig", {**_BERT, "pad_token_id": 0, "position_embedding_type": "rotary"},
        {"encoder layer": 2, "attention": 2, "merged projections": 6, "linear + residual": 4, "linear": 2,
         "first token: linear + activation": 1},
    ),
    "bart": Family(
        "BartModel", "BartConfig", _BART,
        {"encoder layer": 2, "decoder layer": 2, "attention": 6, "merged projections": 24, "linear": 8},
    ),
    "gpt2": Family(
        "GPT2Model", "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY},
        {"attention": 2, "transposed linear": 8, "decoder layer": 2},
    ),
}  # fmt: skip


def batches(length: int = 11) -> dict[str, dict[str, Tensor]]:
    """Input ids of shape [3, length]: without padding, padded on the right and on the left, and one short sequence."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, VOCABULARY, (3, length), generator=generator)
    lengths = torch.tensor([length, length - 4, 2])[:, None]
    right = (torch.arange(length) < lengths).long()
    return {
        "full": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "right": {"input_ids": ids, "attention_mask": right},
        "left": {"input_ids": ids, "attention_mask": right.flip(1)},
        "single": {"input_ids": ids[:1, :3], "attention_mask": torch.ones(1, 3, dtype=torch.long)},
    }
