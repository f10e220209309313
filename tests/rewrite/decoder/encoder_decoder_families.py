"""Tiny random encoder-decoders of every family whose decoders must be accelerated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, PAD, END = 128, 0, 1
LAYERS = 3
_TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    **_TOKENS,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": LAYERS,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BART = {
    **_TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 384,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
_WHISPER = {
    **{name: value for name, value in _BART.items() if not name.startswith(("max_position", "forced"))},
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 384,
    "begin_suppress_tokens": None,
}

_SPEECH = {
    **{name: value for name, value in _BART.items() if not name.startswith(("max_position", "forced"))},
    "input_feat_per_channel": 8,
    "input_channels": 1,
    "max_source_positions": 40,
    "max_target_positions": 384,
}


@dataclass(frozen=True)
class EncoderDecoder:
    """A model class without its `ForConditionalGeneration`, its config, and how many layers of its decoder must be fused."""

    stem: str
    settings: dict[str, object]
    fused: int = LAYERS
    model: str = ""

    def build(self, seed: int = 0) -> nn.Module:
        """Eval mode. Biases and norms get noise and weights some size, so that a dropped or wrong one shows."""
        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.stem}Config")(**self.settings)
        model = getattr(transformers, self.model or f"{self.stem}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "relative_attention_bias" in name:
                    parameter.normal_()
                elif parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif parameter.std() < 0.05:
                    parameter.mul_(4)
        settings = model.generation_config
        settings.eos_token_id, settings.pad_token_id, settings.decoder_start_token_id = None, PAD, 2
        return model

    def inputs(self, *, padded: bool = False, length: int = 9) -> dict[str, Tensor]:
        """What two texts (or sounds) give the encoder; the second one is shorter if `padded`."""
        generator = torch.Generator().manual_seed(length)
        if self.stem == "Whisper":
            return {"input_features": torch.randn(2, 8, 40, generator=generator)}
        if self.stem == "Speech2Text":
            return {"input_features": torch.randn(2, 40, 8, generator=generator)}
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            ids[1, -4:], mask[1, -4:] = PAD, 0
        return {"input_ids": ids, "attention_mask": mask}


FAMILIES = {
    "t5": EncoderDecoder("T5", _T5),
    "t5-v1.1": EncoderDecoder("T5", {**_T5, **_GATED}),
    "mt5": EncoderDecoder("MT5", {**_T5, **_GATED}),
    "umt5": EncoderDecoder("UMT5", {**_T5, **_GATED}),
    "bart": EncoderDecoder("Bart", _BART),
    "mbart": EncoderDecoder("MBart", _BART),
    "m2m100": EncoderDecoder("M2M100", _BART),
    "marian": EncoderDecoder("Marian", {**_BART, "activation_function": "silu"}, model="MarianMTModel"),
    "pegasus": EncoderDecoder("Pegasus", {**_BART, "activation_function": "relu"}),
    "blenderbot": EncoderDecoder("Blenderbot", _BART),
    "speech-to-text": EncoderDecoder("Speech2Text", _SPEECH),
    "whisper": EncoderDecoder("Whisper", _WHISPER),
}
