"""`CPUCache` against transformers' `DynamicCache`, through the same random sequences of calls."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache

from hf_cpu_accel.generate.cache import CPUCache, CPUCacheLayer, CPUCrossCache
from hf_cpu_accel.ops.kv_cache import from_storage, to_storage
from tests.generate.cache_cases import CONFIGS, DIM, GEMMA, HEADS, LLAMA, WINDOW, Both, states


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@given(data=st.data())
@settings(max_examples=25)
def test_any_sequence_of_calls_gives_what_transformers_cache_gives(config, data):
    both = Both(config)
    batch = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(1, 12))):
        call = data.draw(st.sampled_from(["token", "token", "chunk", "reorder", "repeat", "select", "reset"]))
        if call in ("token", "chunk"):
            both.update(batch, 1 if call == "token" else data.draw(st.integers(2, 90)))
        elif both.theirs.get_seq_length() == 0:
            continue
        elif call == "reorder":
            beams = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
            both.both("reorder_cache", torch.tensor(beams))
        elif call == "repeat":
            both.both("batch_repeat_interleave", 2)
            batch *= 2
        elif call == "select":
            chosen = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=2))
            both.both("batch_select_indices", torch.tensor(chosen))
            batch = len(chosen)
        else:
            both.both("reset")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@given(data=st.data())
@settings(max_examples=25)
def test_speculation_is_taken_back_as_in_transformers_cache(config, data):
    both = Both(config, record=True)
    both.update(1, data.draw(st.integers(1, 100)))
    for _ in range(data.draw(st.integers(1, 30))):
        guessed = data.draw(st.integers(1, 9))
        both.update(1, guessed)
        both.both("crop", -data.draw(st.integers(0, guessed)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_token_is_written_in_place_and_returned_as_a_view(config):
    cache = CPUCache(config)
    for layer in range(len(cache)):
        cache.update(*states(2, 70, layer), layer)
    addresses = {layer.key_storage.data_ptr() for layer in cache.layers}
    room = min(layer.capacity - layer.length for layer in cache.layers[1:])
    for token in range(room):
        for index, layer in enumerate(cache.layers):
            keys, values = cache.update(*states(2, 1, token), index)
            assert keys.untyped_storage().data_ptr() == layer.key_storage.untyped_storage().data_ptr()
            assert values.untyped_storage().data_ptr() == layer.value_storage.untyped_storage().data_ptr()
    full = [layer for layer in cache.layers if not layer.is_sliding]
    assert all(layer.key_storage.data_ptr() in addresses for layer in full)


def test_storage_grows_rarely_and_by_half():
    cache, capacities = CPUCache(LLAMA), []
    for token in range(2000):
        cache.update(*states(1, 1, token), 0)
        if not capacities or capacities[-1] != cache.layers[0].capacity:
            capacities.append(cache.layers[0].capacity)
    assert len(capacities) <= 8
    assert all(capacity % 64 == 0 for capacity in capacities)
    assert capacities[-1] <= 3200


@pytest.mark.parametrize("prompt", [5, 1000])
def test_a_sliding_window_holds_no_more_than_about_two_windows(prompt):
    cache, addresses = CPUCache(GEMMA), set()
    layer = cache.layers[0]
    cache.update(*states(1, prompt, 0), 0)
    for token in range(500):
        cache.update(*states(1, 1, token), 0)
        addresses.add(layer.key_storage.data_ptr())
    assert layer.is_sliding
    assert layer.get_seq_length() == prompt + 500
    assert layer.capacity <= 2 * WINDOW + 256 + 192
    assert len(addresses) <= 3


def test_beams_copy_no_keys():
    cache = CPUCache(LLAMA)
    keys, values = states(4, 10, 0)
    for layer in range(2):
        cache.update(keys, values, layer)
    storage = [layer.key_storage for layer in cache.layers]
    before = [tensor.clone() for tensor in storage]
    cache.reorder_cache(torch.tensor([0, 1, 2, 3]))
    assert cache.rows is None
    cache.reorder_cache(torch.tensor([2, 2, 0, 1]))
    assert all(layer.key_storage is tensor for layer, tensor in zip(cache.layers, storage, strict=True))
    for tensor, copied in zip(storage, before, strict=True):
        assert torch.equal(tensor[:, :, :10], copied[:, :, :10])
    assert cache.rows.dtype is torch.int32
    assert cache.rows.shape[1] >= cache.layers[0].capacity
    assert cache.rows[:, :10].tolist() == [[row] * 10 for row in (2, 2, 0, 1)]
    assert cache.rows[:, 10:].unique(dim=1).flatten().tolist() == [
        0,
        1,
        2,
        3,
    ]  # new tokens go to their own row
    assert cache.layers[0].beams is cache.layers[1].beams


def test_beams_of_an_encoder_are_copied_once():
    cache = EncoderDecoderCache(CPUCache(LLAMA), CPUCrossCache(LLAMA))
    theirs = EncoderDecoderCache(DynamicCache(config=LLAMA), DynamicCache(config=LLAMA))
    keys, values = (state.repeat_interleave(3, dim=0) for state in states(2, 7, 0))
    for layer in range(2):
        for both in (cache, theirs):
            both.cross_attention_cache.update(keys, values, layer)
            both.self_attention_cache.update(keys[:, :, :1], values[:, :, :1], layer)
    storage = None
    for beams in ([0, 0, 0, 3, 3, 3], [1, 0, 2, 3, 5, 5], [2, 2, 1, 4, 4, 4]):
        cache.reorder_cache(torch.tensor(beams))
        theirs.reorder_cache(torch.tensor(beams))
        layer, expected = cache.cross_attention_cache.layers[0], theirs.cross_attention_cache.layers[0]
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)
        assert torch.equal(
            cache.self_attention_cache.layers[1].keys, theirs.self_attention_cache.layers[1].keys
        )
        assert storage in (None, layer.key_storage.data_ptr())
        storage = layer.key_storage.data_ptr()


def test_cross_attention_rows_that_differ_are_moved():
    cache, theirs = CPUCrossCache(LLAMA), DynamicCache(config=LLAMA)
    for both in (cache, theirs):
        both.update(*states(4, 5, 0), 0)
        for beams in ([3, 0, 1, 2], [3, 3, 0, 1], [0, 1, 1, 0]):
            both.reorder_cache(torch.tensor(beams))
    assert torch.equal(cache.layers[0].keys, theirs.layers[0].keys)


def test_a_fused_layer_writes_the_storage_itself():
    cache, reference = CPUCache(GEMMA), DynamicCache(config=GEMMA)
    for step, length in enumerate([40, 1, 1, 7] + [1] * 60):
        for index, layer in enumerate(cache.layers):
            keys, values = states(2, length, 100 * step + index)
            layer.reserve(2, HEADS, DIM, DIM, torch.float32, length)
            past = layer.length
            layer.key_storage[:, :, past : past + length] = keys
            layer.value_storage[:, :, past : past + length] = values
            layer.advance(length)
            reference.update(keys, values, index)
            assert torch.equal(layer.keys, reference.layers[index].keys)
            assert torch.equal(layer.values, reference.layers[index].values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_storage_of_another_dtype(dtype):
    cache = CPUCache(LLAMA, dtype=dtype)
    for step in range(3):
        keys, values = states(1, 5, step)
        returned = cache.update(keys, values, 0)
    layer = cache.layers[0]
    assert layer.key_storage.dtype is dtype
    assert layer.dtype is torch.float32
    for read, written in zip((*returned, layer.keys, layer.values), (keys, values) * 2, strict=True):
        assert read.dtype is torch.float32
        assert read.shape == (1, HEADS, 15, DIM)
        assert torch.equal(read[:, :, 10:], from_storage(to_storage(written, dtype), torch.float32))
        error = (read[:, :, 10:] - written).abs().amax(dim=-1) / written.abs().amax(dim=-1)
        assert error.max() <= (2**-8 if dtype is torch.bfloat16 else 0.5 / 127 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_narrow_storage_goes_through_all_that_a_wide_one_does(dtype, config):
    """Beams, copies, crops and windows move stored values without changing them."""

    def rounded(state):
        return from_storage(to_storage(state, dtype), torch.float32)

    ours, theirs = CPUCache(config, dtype=dtype), DynamicCache(config=config)
    for cache in (ours, theirs):
        cache.activate_past_recording()
    seed = 0
    for length, change in (
        (40, lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0]))),
        (1, lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2]))),
        (90, lambda cache: cache.crop(-7)),
        (1, lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
        (3, lambda cache: cache.batch_repeat_interleave(2)),
        (1, lambda cache: cache.reorder_cache(torch.tensor([3, 0, 1, 1]))),
        (60, lambda cache: cache.crop(0)),
    ):
        batch = 3 if seed == 0 else ours.layers[0].keys.shape[0]
        for layer in range(len(theirs)):
            seed += 1
            keys, values = states(batch, length, seed)
            read = ours.update(keys, values, layer)
            expected = theirs.update(rounded(keys), rounded(values), layer)
            assert all(map(torch.equal, read, expected))
        for cache in (ours, theirs):
            change(cache)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_go_their_own_way(duplicate):
    cache = CPUCache(GEMMA)
    for layer in range(3):
        cache.update(*states(2, 30, layer), layer)
    cache.reorder_cache(torch.tensor([1, 0]))
    twin = duplicate(cache)
    before = [layer.keys.clone() for layer in cache.layers]
    for layer in range(3):
        twin.update(*states(2, 1, 9), layer)
    twin.reorder_cache(torch.tensor([1, 1]))
    assert twin.get_seq_length() == 31
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    assert twin.layers[0].beams is twin.layers[1].beams


def test_a_cache_that_was_filled_in_inference_mode_can_be_used_outside_of_it():
    cache = CPUCache(LLAMA)
    with torch.inference_mode():
        cache.update(*states(1, 5, 0), 0)
        cache.batch_repeat_interleave(2)
    cache.update(*states(2, 1, 1), 0)
    assert cache.get_seq_length() == 6


def test_what_no_layer_wrote_is_not_a_number_that_spoils_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers skip left padding; other layers multiply its values by probability 0."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    layer = CPUCacheLayer()
    layer.reserve(2, 1, 4, 4, torch.float32, 3)
    layer.advance(3)
    layer.reserve(2, 1, 4, 4, torch.float32, 500)  # moves to a larger storage
    assert torch.equal(layer.keys, torch.zeros(2, 1, 3, 4))
    assert torch.equal(layer.values, torch.zeros(2, 1, 3, 4))
