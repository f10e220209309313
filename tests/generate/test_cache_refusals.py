"""Errors of a cache: other storage dtypes, models, batches, layers, and tokens that cannot be removed."""

import pytest
import torch
from transformers import LlamaConfig

from hf_cpu_accel.generate.cache import CPUCache, cache_refusal
from tests.generate.cache_cases import _SIZES, DIM, GEMMA, HEADS, LLAMA, states


def test_other_storages_are_refused():
    with pytest.raises(
        ValueError, match=r"dtype=torch\.float16 is not supported: use one of None, torch\.float32"
    ):
        CPUCache(LLAMA, dtype=torch.float16)


@pytest.mark.parametrize("other", [(3, HEADS, DIM), (2, HEADS + 1, DIM), (2, HEADS, DIM + 1)])
def test_keys_of_another_model_or_batch_are_refused(other):
    cache = CPUCache(LLAMA)
    cache.update(*states(2, 5, 0), 0)
    wrong = torch.zeros(other[0], other[1], 1, other[2])
    with pytest.raises(ValueError, match=f"batch size 2 and {HEADS} heads of {DIM} features.*pass a cache"):
        cache.update(wrong, wrong, 0)
    assert cache.get_seq_length() == 5
    cache.reset()
    cache.update(wrong, wrong, 0)
    assert cache.get_seq_length() == 1


def test_more_layers_than_the_cache_has_are_refused():
    with pytest.raises(ValueError, match="has 2 layers"):
        CPUCache(LLAMA).update(*states(1, 1, 0), 2)


def test_crop_wants_a_negative_number():
    cache = CPUCache(LLAMA)
    cache.update(*states(1, 5, 0), 0)
    with pytest.raises(ValueError, match="tokens_to_remove=3"):
        cache.layers[0].crop(3)


def test_what_left_the_window_cannot_be_taken_back():
    cache = CPUCache(GEMMA)
    for token in range(600):
        cache.update(*states(1, 1, token), 0)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.layers[0].crop(-580)
    assert cache.get_seq_length() == 600


def test_models_with_other_state_are_refused():
    config = LlamaConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **_SIZES)
    assert "LinearAttentionLayer" in cache_refusal(config)
    with pytest.raises(ValueError, match="LinearAttentionLayer"):
        CPUCache(config)
    assert cache_refusal(LLAMA) is None
