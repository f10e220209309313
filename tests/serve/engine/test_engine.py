"""The tokens of an engine against those of `generate`."""

import pytest
import torch

from hf_cpu_accel.serve.engine import Busy, Engine
from tests.generate.decoders import END, accelerated, prompt


def expected(model, ids, tokens):
    inputs = torch.tensor([ids])
    return model.generate(inputs, do_sample=False, max_new_tokens=tokens, eos_token_id=END)[
        0, len(ids) :
    ].tolist()


def test_tokens_are_those_of_generate():
    model = accelerated("llama")
    ids = prompt(9)["input_ids"][0].tolist()
    engine = Engine(model)
    generation = engine.submit(ids, max_new_tokens=12, eos_token_id=END)
    assert list(generation) == generation.result() == expected(model, ids, 12)
    assert generation.finish_reason in ("stop", "length")
    engine.close()
    with pytest.raises(Busy):
        engine.submit(ids, max_new_tokens=12)
