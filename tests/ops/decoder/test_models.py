"""decoder_layers against the decoder of a transformers model: prefill, decoding and left padding."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel.ops.decoder.layers import (
    BoundLayers,
    DecoderLayer,
    FeedForward,
    Heads,
    Norm,
    Projection,
    SelfAttention,
    bind,
    decoder_layers,
)
from hf_cpu_accel.packing.linear import pack_linear

BATCH, PROMPT, STEPS, CAPACITY = 2, 7, 3, 16


def projection(*parts: nn.Linear) -> Projection:
    """The linear layers side by side."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Projection(
        pack_linear(torch.cat([part.weight for part in parts]), "float32"),
        torch.cat(biases) if biases else None,
    )


def norm(module: nn.Module) -> Norm:
    return Norm("rms_norm", module.weight, None, module.variance_epsilon)


def llama() -> tuple[nn.Module, BoundLayers]:
    config = tf.LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
    )
    model = tf.LlamaModel(config).eval()
    layers = []
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layers.append(
            DecoderLayer(
                SelfAttention(
                    qkv=projection(attention.q_proj, attention.k_proj, attention.v_proj),
                    heads=6,
                    kv_heads=2,
                    head_dim=16,
                    value_dim=16,
                    query=Heads(0, 3 * 16, 16),
                    key=Heads(6 * 16, 16),
                    value=Heads(8 * 16, 16),
                    scale=attention.scaling,
                    output=projection(attention.o_proj),
                    rotary_dim=16,
                ),
                FeedForward(projection(mlp.gate_proj, mlp.up_proj), True, "silu", projection(mlp.down_proj)),
                attention_norm=norm(layer.input_layernorm),
                ffn_norm=norm(layer.post_attention_layernorm),
            )
        )
    return model, bind(layers)


def neox() -> tuple[nn.Module, BoundLayers]:
    """Query, key and value of a head side by side, parallel branches, layer norms, a quarter of each head rotated."""
    config = tf.GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=97,
    )
    model = tf.GPTNeoXModel(config).eval()

    def layer_norm(module: nn.LayerNorm) -> Norm:
        return Norm("layer_norm", module.weight, module.bias, module.eps)

    layers = [
        DecoderLayer(
            SelfAttention(
                qkv=projection(layer.attention.query_key_value),
                heads=4,
                kv_heads=4,
                head_dim=16,
                value_dim=16,
                query=Heads(0, 48, 16),
                key=Heads(16, 48),
                value=Heads(32, 48),
                scale=layer.attention.scaling,
                output=projection(layer.attention.dense),
                rotary_dim=4,
            ),
            FeedForward(
                projection(layer.mlp.dense_h_to_4h), False, "gelu", projection(layer.mlp.dense_4h_to_h)
            ),
            attention_norm=layer_norm(layer.input_layernorm),
            ffn_norm=layer_norm(layer.post_attention_layernorm),
            parallel=True,
        )
        for layer in model.layers
    ]
    return model, bind(layers)


class Decoder:
    """A model's decoder around the op: embeddings, positions and the last norm are the model's."""

    def __init__(self, model: nn.Module, layers: BoundLayers) -> None:
        self.model, self.layers, self.past = model, layers, 0
        self.keys, self.values = [], []
        for kv_heads, head_dim, value_dim in layers.cache_heads:
            self.keys.append(torch.full((BATCH, kv_heads, CAPACITY, head_dim), torch.nan))
            self.values.append(torch.full((BATCH, kv_heads, CAPACITY, value_dim), torch.nan))

    def __call__(self, ids: Tensor, position_ids: Tensor, start: Tensor | None) -> Tensor:
        model = self.model
        embed = model.embed_tokens if hasattr(model, "embed_tokens") else model.embed_in
        hidden_states = embed(ids)
        hidden_states = decoder_layers(
            hidden_states,
            self.layers,
            self.keys,
            self.values,
            [self.past] * len(self.layers),
            rotary=[model.rotary_emb(hidden_states, position_ids)],
            start=start,
        )
        self.past += ids.shape[1]
        return (model.norm if hasattr(model, "norm") else model.final_layer_norm)(hidden_states)


@torch.no_grad()
@pytest.mark.parametrize("family", [llama, neox])
@pytest.mark.parametrize("padded", [False, True])
def test_prefill_and_decode(family, padded: bool) -> None:
    torch.manual_seed(0)
    model, layers = family()
    decoder = Decoder(model, layers)
    cache = tf.DynamicCache(config=model.config)
    start = torch.tensor([0, 3], dtype=torch.int32) if padded else None
    attention_mask = torch.ones(BATCH, PROMPT, dtype=torch.int64)
    if padded:
        attention_mask[1, :3] = 0
    for step in range(STEPS):
        ids = torch.randint(0, 97, (BATCH, PROMPT if step == 0 else 1))
        if step:
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(BATCH, 1)], dim=1)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        expected = model(
            ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=cache
        ).last_hidden_state
        actual = decoder(ids, position_ids, start)
        tokens = attention_mask[:, -ids.shape[1] :].bool()
        torch.testing.assert_close(actual[tokens], expected[tokens], rtol=1e-4, atol=1e-5)
