"""The suite of Hugging Face's models: the sizes of the checkpoints that PyTorch's list names, 128 tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.suites.model import Inputs, Model, token_ids
from hf_cpu_accel.cli.decoder_shapes import LLAMA_3_2_1B, QWEN3_0_6B


def _build(model: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made


def _model(family: str, name: str, config: str, inputs: Inputs | None = None, **sizes: Any) -> Model:
    vocabulary = sizes.get("vocab_size", 30_000)
    return Model(family, partial(_build, name, config, sizes), inputs or token_ids(vocabulary, "input_ids"))


def _boxes(batch: int, generator: Generator) -> dict[str, Tensor]:
    """Return token ids, and the box of each token on the page: left, top, right, bottom, from 0 to 1000."""
    first, more = torch.randint(0, 500, (2, batch, 128, 2), generator=generator)
    return {**token_ids(30_000, "input_ids")(batch, generator), "bbox": torch.cat((first, first + more), -1)}


def _decoder(config: str, **sizes: Any) -> Model:
    return _model("decoders", f"{config.removesuffix('Config')}ForCausalLM", config, is_decoder=True, **sizes)


_BOTH = ("input_ids", "decoder_input_ids")
_MEGATRON = {
    "vocab_size": 29_056,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_GEMMA = {
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
_PLBART = {
    "vocab_size": 50_005,
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
}
_XLNET = {"vocab_size": 32_000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
_ALBERT = {"vocab_size": 30_000, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_OPT = {
    "vocab_size": 50_272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
}
_DEBERTA = {
    "vocab_size": 128_100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}

MODELS: dict[str, Model] = {
    "AlbertForMaskedLM": _model("encoders", "AlbertForMaskedLM", "AlbertConfig", **_ALBERT),
    "AllenaiLongformerBase": _model(
        "encoders",
        "LongformerForMaskedLM",
        "LongformerConfig",
        vocab_size=50_265,
        max_position_embeddings=4098,
        type_vocab_size=1,
        pad_token_id=1,
    ),
    "BartForCausalLM": _decoder("BartConfig", vocab_size=50_265),
    "BertForMaskedLM": _model("encoders", "BertForMaskedLM", "BertConfig", vocab_size=30_522),
    "BertForQuestionAnswering": _model(
        "encoders", "BertForQuestionAnswering", "BertConfig", vocab_size=30_522
    ),
    "BigBird": _model("encoders", "BigBirdForMaskedLM", "BigBirdConfig", vocab_size=50_358),
    "BlenderbotForCausalLM": _decoder(
        "BlenderbotConfig",
        vocab_size=8008,
        d_model=1280,
        encoder_layers=12,  # it has none, but transformers counts the layers of its cache by them
        decoder_layers=12,
        decoder_attention_heads=32,
        decoder_ffn_dim=5120,
    ),
    "BlenderbotSmallForCausalLM": _decoder("BlenderbotSmallConfig", vocab_size=50_265),
    "CamemBert": _model(
        "encoders",
        "CamembertForMaskedLM",
        "CamembertConfig",
        vocab_size=32_005,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    "DebertaV2ForMaskedLM": _model("encoders", "DebertaV2ForMaskedLM", "DebertaV2Config", **_DEBERTA),
    "DistilBertForMaskedLM": _model(
        "encoders", "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=30_522
    ),
    "DistillGPT2": _model("decoders", "GPT2LMHeadModel", "GPT2Config", vocab_size=50_257, n_layer=6),
    "ElectraForCausalLM": _model(
        "decoders", "ElectraForCausalLM", "ElectraConfig", vocab_size=30_522, is_decoder=True
    ),
    "GPT2ForSequenceClassification": _model(
        "decoders", "GPT2ForSequenceClassification", "GPT2Config", vocab_size=50_257, pad_token_id=0
    ),
    "GPTNeoForCausalLM": _model(
        "decoders",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=50_257,
        hidden_size=768,
        num_layers=12,
        attention_types=[[["global", "local"], 6]],
        num_heads=12,
    ),
    "GoogleFnet": _model("encoders", "FNetForMaskedLM", "FNetConfig", vocab_size=32_000),
    "LayoutLMForMaskedLM": _model(
        "encoders", "LayoutLMForMaskedLM", "LayoutLMConfig", _boxes, vocab_size=30_522
    ),
    "M2M100ForConditionalGeneration": _model(
        "encoder-decoders",
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        token_ids(128_112, *_BOTH),
        vocab_size=128_112,
    ),
    "MBartForCausalLM": _decoder("MBartConfig", vocab_size=50_265),
    "MT5ForConditionalGeneration": _model(
        "encoder-decoders",
        "MT5ForConditionalGeneration",
        "MT5Config",
        token_ids(250_112, *_BOTH),
        vocab_size=250_112,
        d_ff=1024,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=6,
    ),
    "MegatronBertForCausalLM": _decoder("MegatronBertConfig", **_MEGATRON),
    "MobileBertForMaskedLM": _model(
        "encoders", "MobileBertForMaskedLM", "MobileBertConfig", vocab_size=30_522
    ),
    "OPTForCausalLM": _model("decoders", "OPTForCausalLM", "OPTConfig", **_OPT),
    "PLBartForCausalLM": _decoder("PLBartConfig", **_PLBART),
    "PegasusForCausalLM": _decoder("PegasusConfig", vocab_size=50_265),
    "RobertaForCausalLM": _decoder(
        "RobertaConfig", vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1
    ),
    "T5ForConditionalGeneration": _model(
        "encoder-decoders",
        "T5ForConditionalGeneration",
        "T5Config",
        token_ids(32_128, *_BOTH),
        vocab_size=32_128,
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
    ),
    "T5Small": _model(
        "encoder-decoders",
        "T5ForConditionalGeneration",
        "T5Config",
        token_ids(32_128, *_BOTH),
        vocab_size=32_128,
    ),
    "TrOCRForCausalLM": _model("decoders", "TrOCRForCausalLM", "TrOCRConfig", vocab_size=50_265),
    "XGLMForCausalLM": _model("decoders", "XGLMForCausalLM", "XGLMConfig", vocab_size=256_008),
    "XLNetLMHeadModel": _model("encoders", "XLNetLMHeadModel", "XLNetConfig", **_XLNET),
    "YituTechConvBert": _model("encoders", "ConvBertForMaskedLM", "ConvBertConfig", vocab_size=30_522),
    "Llama-3.2-1B": _model("decoders", "LlamaForCausalLM", "LlamaConfig", **LLAMA_3_2_1B),
    "Qwen3-0.6B": _model("decoders", "Qwen3ForCausalLM", "Qwen3Config", **QWEN3_0_6B),
    "gemma-3-270m": _model("decoders", "Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA),
}
