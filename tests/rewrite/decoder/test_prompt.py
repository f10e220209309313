"""Decoders without tokens: their layers are matched with a prompt of hidden states."""

from __future__ import annotations

import torch
import transformers as tf
from transformers.models.voxtral_realtime.configuration_voxtral_realtime import VoxtralRealtimeEncoderConfig
from transformers.models.voxtral_realtime.modeling_voxtral_realtime import VoxtralRealtimeEncoder

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.decoder.layer import FusedDecoderLayer

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}


@torch.no_grad()
def test_a_causal_encoder_of_speech() -> None:
    """Voxtral Realtime's, whose layers take a cache."""
    torch.manual_seed(0)
    config = VoxtralRealtimeEncoderConfig(**_SIZES, num_key_value_heads=4, num_mel_bins=8, sliding_window=6)
    model = VoxtralRealtimeEncoder(config).eval()
    states = torch.randn(1, 9, 64)

    def steps() -> torch.Tensor:
        cache = tf.DynamicCache(config=config)
        parts = [
            model(inputs_embeds=part, cache=cache, use_cache=True)[0]
            for part in states.split([5, 1, 3], dim=1)
        ]
        return torch.cat([*parts, model(inputs_embeds=states, use_cache=False)[0]], dim=1)

    before = steps()
    accelerate_for_cpu(model, dtype="float32")
    assert sum(isinstance(module, FusedDecoderLayer) for module in model.modules()) == 2
    assert row_error(steps(), before) <= 1e-4
    restore(model)
    assert torch.equal(steps(), before)
