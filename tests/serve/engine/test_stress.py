"""Eight clients at once with random lengths, who may leave; each answer is checked."""

import random
import threading

from hf_cpu_accel.serve.engine import Busy, Engine
from hf_cpu_accel.serve.engine.prefix_cache import BLOCK
from tests.generate.decoders import accelerated
from tests.serve.engine.cases import alone, text

TEXTS, MOST, CLIENTS, REQUESTS = 16, 40, 8, 13


def prompts():
    """Some begin alike, for a few tokens or many."""
    chosen = random.Random(0)
    beginnings = [text(length, seed=length) for length in (1, BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 7)]
    return [
        [*chosen.choice(beginnings), *text(chosen.randint(1, 40), seed=10 + number)]
        for number in range(TEXTS)
    ]


def test_no_answer_is_mixed_up_or_lost():
    model, asked = accelerated("llama"), prompts()
    expected = [alone(model, ids, MOST, eos_token_id=None) for ids in asked]
    wrong, ended, busy = [], [], []

    def client(seed):
        chosen = random.Random(seed)
        for _ in range(REQUESTS):
            number, tokens = chosen.randrange(TEXTS), chosen.randint(1, MOST)
            leaves = chosen.randint(1, MOST) if chosen.random() < 0.3 else None
            while True:
                try:
                    generation = engine.submit(asked[number], max_new_tokens=tokens)
                    break
                except Busy:
                    busy.append(number)
                    threading.Event().wait(0.002)
            seen = []
            for token in generation:
                seen.append(token)
                if len(seen) == leaves:
                    generation.cancel()
            whole = generation.finish_reason == "length"
            if seen != expected[number][: len(seen)] or (whole and len(seen) != tokens):
                wrong.append((number, tokens, seen))
            ended.append(generation.finish_reason)

    layout_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, features
    kept = 9 * BLOCK * layout_bytes
    with Engine(model, rows=4, waiting=3, prefill_chunk=24, prefix_cache_bytes=kept) as engine:
        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    metrics = engine.metrics
    assert not wrong
    assert len(ended) == CLIENTS * REQUESTS == metrics.completed + metrics.cancelled
    assert {"length", "cancelled"} == set(ended)
    assert busy
    assert (metrics.running, metrics.waiting, metrics.failed) == (0, 0, 0)
    assert 0 < metrics.prefix_cache_bytes <= kept
    assert 0 < metrics.prefix_tokens < metrics.prompt_tokens
