"""In dtypes that round, a prompt of which a part was computed before: its logits are moved by rounding and by nothing else."""

import pytest
import torch

from benchmarks.serving.prefixes import by_last_bit, by_prefix, gap
from hf_cpu_accel.serve.engine import Engine
from hf_cpu_accel.serve.engine.forward import Forward
from tests.generate.decoders import accelerated
from tests.serve.engine.cases import text

# Of the length of a row of logits. Keys in wrong places move them by 0.4 and more.
MOST = {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.05}
PROMPTS = [text(length, seed=length) for length in range(34, 150, 9)]


@pytest.mark.parametrize("dtype", MOST)
def test_a_prefix_moves_logits_no_further_than_rounding(dtype):
    model = accelerated("llama", dtype)
    with torch.no_grad():
        forward = Forward(model)
        moved = [by_prefix(forward, ids) for ids in PROMPTS]
        rounding = max(by_last_bit(model, ids, seed) for seed, ids in enumerate(PROMPTS))
    assert max(moved) <= MOST[dtype]
    assert max(moved) <= max(3 * rounding, 1e-5)


@pytest.mark.parametrize("dtype", MOST)
def test_only_tokens_that_are_as_probable_change_places(dtype):
    model = accelerated("llama", dtype)
    with Engine(model, rows=2) as engine:
        for ids in PROMPTS:
            engine.submit(ids, max_new_tokens=1).result()
        for ids in PROMPTS:
            answer = engine.submit(ids, max_new_tokens=24)
            found = gap(model, ids, answer.result())
            assert answer.cached_tokens
            assert found is None or found <= 3 * MOST[dtype]
