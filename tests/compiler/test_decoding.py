"""Token by token with our cache: one graph for prompts and one for tokens, keys and values written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler import report, torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.cache_layer import bucket


def llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def write(fast: Any, model: Any, batch: int, length: int, tokens: int) -> CPUCache:
    """Compare `tokens` steps with the model itself; returns the cache of `fast`."""
    cache, reference = CPUCache(model.config), CPUCache(model.config)
    ids = torch.randint(0, 100, (batch, length))
    for _ in range(1 + tokens):
        got = fast(input_ids=ids, past_key_values=cache).logits
        expected = model(input_ids=ids, past_key_values=reference).logits
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        ids = expected[:, -1:].argmax(-1)
    return cache


@pytest.mark.usefixtures("no_codegen")
def test_two_graphs_serve_all_lengths_and_storages_of_all_sizes(compiled: Any) -> None:
    model = llama(2)
    fast = compiled(model)
    write(fast, model, 2, 9, 3)
    write(fast, model, 3, 5, 3)  # from here on the batch of a token is a symbol, too
    graphs = len(report.graphs())
    assert graphs == 3
    for batch, length in ((2, 70), (5, 11), (4, 130)):
        cache = write(fast, model, batch, length, 20)
        assert cache.layers[0].capacity == bucket(length) >= length + 20
    assert len(report.graphs()) == graphs
    assert [graph.rewrites.get("attention") for graph in report.graphs()] == [2] * graphs


def test_generated_code_writes_in_place() -> None:
    model = llama(1)
    fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
    cache = write(fast, model, 2, 9, 2)
    storage = cache.layers[0].key_storage
    with torch.no_grad():
        fast(input_ids=torch.randint(0, 100, (2, 1)), past_key_values=cache)
    assert cache.layers[0].key_storage is storage
    assert not torch_private.counters("graph_break")


@pytest.mark.usefixtures("no_codegen")
@torch.no_grad()
def test_an_accelerated_decoder_with_sizes_that_are_symbols(compiled: Any) -> None:
    model = accelerate_for_cpu(llama(1), dtype="float32")
    fast = compiled(model)
    for batch, length in ((2, 9), (3, 5)):
        ids = torch.randint(0, 100, (batch, length))
        got, expected = (m(input_ids=ids, use_cache=False).logits for m in (fast, model))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
