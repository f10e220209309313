"""What is kept of earlier sequences, and who gets it."""

import pytest
import torch

from hf_cpu_accel.serve.engine import Engine
from hf_cpu_accel.serve.engine.prefix_cache import BLOCK, PrefixCache
from hf_cpu_accel.serve.engine.storage import Layout
from tests.generate.decoders import END, accelerated
from tests.serve.engine.cases import alone, text

LAYOUT = Layout(((2, 1, 3, torch.float32), (1, 2, 2, torch.bfloat16)), ())


def reader(seed=0):
    whole = [
        torch.randn(members, heads, 1000, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for members, heads, width, dtype in LAYOUT.groups
    ]
    return lambda first, last: [values[:, :, first:last] for values in whole]


def cache(blocks):
    return PrefixCache(LAYOUT, blocks * BLOCK * LAYOUT.token_bytes)


def test_matches_are_complete_blocks_of_the_longest_prefix():
    prefixes, read, ids = cache(10), reader(), text(5 * BLOCK + 3)
    prefixes.add(ids, read)
    assert prefixes.bytes == 5 * BLOCK * (2 * 3 * 4 + 2 * 2 * 2)
    assert [len(prefixes.match(ids[:length])) for length in (0, BLOCK - 1, BLOCK, 3 * BLOCK + 1)] == [
        0,
        0,
        1,
        3,
    ]
    found = prefixes.match([*ids[: 2 * BLOCK + 5], 2, *ids[2 * BLOCK + 6 :]])
    assert len(found) == 2
    for number, block in enumerate(found):
        expected = read(number * BLOCK, (number + 1) * BLOCK)
        assert all(map(torch.equal, block.part, expected))


def test_common_prefixes_are_stored_once():
    prefixes, shared = cache(100), text(4 * BLOCK)
    for seed in range(3):
        prefixes.add([*shared, *text(2 * BLOCK, seed=seed + 1)], reader())
    assert prefixes.bytes == (4 + 3 * 2) * BLOCK * LAYOUT.token_bytes


def test_least_recently_used_blocks_are_removed_first():
    prefixes, first, second, third = cache(6), *(text(3 * BLOCK, seed=seed) for seed in range(3))
    prefixes.add(first, reader())
    prefixes.add(second, reader())
    prefixes.match(first)
    prefixes.add(third[: 2 * BLOCK], reader())
    assert [len(prefixes.match(ids)) for ids in (first, second, third)] == [3, 1, 2]  # the ends go first
    prefixes.add([*text(BLOCK, seed=3), *first], reader())
    assert prefixes.bytes <= 6 * BLOCK * LAYOUT.token_bytes


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_long_sequences_leave_their_first_blocks(blocks):
    prefixes, ids = cache(blocks), text(5 * BLOCK)
    prefixes.add(ids, reader())
    assert len(prefixes.match(ids)) == blocks


def test_clear_removes_all_blocks():
    prefixes, ids = cache(3), text(3 * BLOCK)
    prefixes.add(ids, reader())
    prefixes.clear()
    assert prefixes.bytes == 0
    assert not prefixes.match(ids)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bloom"])
def test_turns_of_a_chat_reuse_the_last_turn(name):
    model, ids = accelerated(name), text(70)
    with Engine(model, prefill_chunk=48, max_length=400) as engine:
        for turn in range(3):
            generation = engine.submit(ids, max_new_tokens=20)
            tokens = generation.result()
            assert tokens == alone(model, ids, 20, eos_token_id=None)
            held = 0 if turn == 0 else (len(ids) - 10 - 1) // BLOCK * BLOCK
            assert generation.cached_tokens == held
            ids = [*ids, *tokens, *text(10, seed=turn)]
        assert engine.metrics.prefix_tokens > 100


def test_fully_cached_prompts_get_their_first_token():
    model, ids = accelerated("llama"), text(2 * BLOCK)
    with Engine(model) as engine:
        expected = alone(model, ids, 5)
        for cached in (0, BLOCK):
            generation = engine.submit(ids, max_new_tokens=5, eos_token_id=END)
            assert generation.result() == expected
            assert generation.cached_tokens == cached


def test_simultaneous_requests_share_prefixes():
    model, shared = accelerated("llama"), text(6 * BLOCK)
    asked = [[*shared, *text(9, seed=seed)] for seed in range(4)]
    with Engine(model, rows=4, prefill_chunk=BLOCK) as engine:
        answers = [engine.submit(ids, max_new_tokens=6, eos_token_id=END) for ids in asked]
        assert [answer.result() for answer in answers] == [alone(model, ids, 6) for ids in asked]
        computed = engine.metrics.prompt_tokens - engine.metrics.prefix_tokens
    assert computed < 6 * BLOCK + 4 * 9 + 2 * BLOCK


def test_a_limit_of_zero_stores_nothing():
    model, ids = accelerated("llama"), text(3 * BLOCK)
    with Engine(model, prefix_cache_bytes=0) as engine:
        for _ in range(2):
            generation = engine.submit(ids, max_new_tokens=5, eos_token_id=END)
            assert generation.result() == alone(model, ids, 5)
            assert generation.cached_tokens == engine.metrics.prefix_cache_bytes == 0
