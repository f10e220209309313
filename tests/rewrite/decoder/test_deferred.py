"""The deferred outputs of decoder layers act like ordinary hidden states for readers, holders and writers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite.decoder.deferred import DeferredHiddenStates
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.llama_stack import BATCH, accelerated, llama


@pytest.mark.parametrize("when", ["before", "after"])
@torch.no_grad()
def test_hidden_states_are_captured(when: str) -> None:
    """transformers installs its capture hooks at first use, on the modules at that time."""
    model = llama()
    expected = copy.deepcopy(model)(**BATCH, output_hidden_states=True).hidden_states
    if when == "before":
        model(**BATCH, output_hidden_states=True)
    accelerated(model)
    cache = CPUCache(model.config)
    got = model(**BATCH, output_hidden_states=True, past_key_values=cache).hidden_states
    assert cache.get_seq_length() == 9
    assert len(got) == len(expected) == 6
    assert all(row_error(ours, theirs) <= 1e-4 for ours, theirs in zip(got, expected, strict=True))
    assert not any(isinstance(states, DeferredHiddenStates) for states in got)


@pytest.mark.parametrize("kept", [(0,), (3,), (1, 2), (0, 1, 2, 3, 4)])
@torch.no_grad()
def test_a_host_that_keeps_hidden_states_itself(kept: tuple[int, ...], lengths: list[int]) -> None:
    model = llama()
    tables = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])
    states = torch.randn(2, 9, 64)

    def loop(layers: nn.ModuleList, cache: object) -> list[Tensor]:
        hidden_states, collected = states, []
        for number, layer in enumerate(layers):
            hidden_states = layer(hidden_states, position_embeddings=tables, past_key_values=cache)
            if number in kept:
                collected.append(hidden_states)
        return [*collected, hidden_states]

    expected = loop(model.model.layers, DynamicCache(config=model.config))
    accelerated(model)
    lengths.clear()
    cache = CPUCache(model.config)
    got = loop(model.model.layers, cache)
    assert all(row_error(ours + 0, theirs) <= 1e-4 for ours, theirs in zip(got, expected, strict=True))
    assert sum(lengths) == 5  # each layer ran once
    assert [layer.length for layer in cache.layers] == [9] * 5


@torch.no_grad()
def test_what_leaves_the_model_is_an_ordinary_tensor() -> None:
    family = DECODERS["opt"]
    model = type(family)("OPT", {**family.settings, "_remove_final_layer_norm": True}).build()
    accelerated(model)
    assert type(model.model(**BATCH).last_hidden_state) is Tensor


@torch.no_grad()
def test_pending_hidden_states_look_like_any_tensor() -> None:
    model = accelerated(llama())
    tables = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])
    layer, states = model.model.layers[0], torch.randn(2, 9, 64)

    def pending_states() -> Tensor:
        output = layer(states, position_embeddings=tables)
        assert isinstance(output, DeferredHiddenStates)
        return output

    expected = pending_states() + 0
    assert type(expected) is Tensor
    assert (pending_states().shape, pending_states().dtype) == (expected.shape, expected.dtype)
    assert torch.equal(torch.from_numpy(pending_states().numpy()), expected)
    assert pending_states().tolist() == expected.tolist()
    assert torch.equal(copy.deepcopy(pending_states()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(pending_states())), expected)
    assert torch.equal(torch.stack([pending_states(), expected])[0], expected)


@torch.no_grad()
def test_two_ways_on_from_the_same_hidden_states(lengths: list[int]) -> None:
    model = accelerated(llama())
    tables = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])
    first, second, third, *_ = model.model.layers
    states = torch.randn(2, 9, 64)
    cache = CPUCache(model.config)
    lengths.clear()
    middle = first(states, position_embeddings=tables, past_key_values=cache)
    one = second(middle, position_embeddings=tables, past_key_values=cache)
    other = third(middle, position_embeddings=tables, past_key_values=cache)
    assert (one + 0).shape == (other + 0).shape
    assert lengths == [1, 1, 1]
    assert cache.layers[0].length == 9


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_after_a_layer_was_called_does_not_reach_it(inference: bool) -> None:
    """Neither into its hidden states, nor into the buffer that the first layer was called with."""
    model = llama()
    tables = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])

    def late(layers: nn.ModuleList) -> Tensor:
        buffer = torch.ones(2, 9, 64)
        first = layers[0](buffer, position_embeddings=tables)
        buffer.zero_()
        second = layers[1](first, position_embeddings=tables)
        first[:, 2:].mul_(3)
        return layers[2](second, position_embeddings=tables) + first

    with torch.inference_mode(inference), torch.no_grad():
        expected = late(model.model.layers)
        accelerated(model)
        assert row_error(late(model.model.layers), expected) <= 1e-4


@torch.no_grad()
def test_hidden_states_may_be_changed_between_layers() -> None:
    model = llama()

    def shifted(layers: nn.ModuleList) -> Tensor:
        tables = model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])
        hidden_states = torch.ones(2, 9, 64)
        for layer in layers:
            hidden_states = layer(hidden_states, position_embeddings=tables)
            hidden_states[:, 3] += 1
            hidden_states *= 0.5
        return hidden_states

    expected = shifted(model.model.layers)
    accelerated(model)
    assert row_error(shifted(model.model.layers), expected) <= 1e-4
