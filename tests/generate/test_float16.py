"""Text generation by models with float16 weights: the tokens of the same weights in float32."""

import copy

import pytest
import torch
from transformers import GenerationConfig

from hf_cpu_accel import accelerate_for_cpu, restore
from tests.rewrite.float16_models import CASES, IDS

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def _in_float32(model, *args, **kwargs):
    return copy.deepcopy(model).float().generate(*args, **kwargs)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["opt", "llama", "t5"])
def test_tokens_are_those_of_float32(name, beams):
    model = CASES[name].build()
    if name == "t5":
        model.generation_config.decoder_start_token_id = 0
    expected = _in_float32(model, IDS, **GREEDY, num_beams=beams)
    accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(model.generate(IDS, **GREEDY, num_beams=beams), expected)


def test_sound():
    model, features = CASES["whisper"].build(), torch.randn(1, 16, 100).half()
    expected = _in_float32(model, features.float(), **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    for given in (features, features.float()):
        assert torch.equal(model.generate(given, **GREEDY), expected)


def test_what_is_returned_besides_has_the_dtypes_of_eager():
    model = CASES["opt"].build()
    asked = {
        **GREEDY,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    eager = model.generate(IDS, **asked)
    accelerate_for_cpu(model, dtype="float32")
    ours = model.generate(IDS, **asked)
    for of in (lambda o: o.scores[0], lambda o: o.logits[0], lambda o: o.hidden_states[0][0]):
        assert of(ours).dtype is of(eager).dtype


def test_other_ways_to_generate():
    model, other = CASES["opt"].build(), CASES["opt"].build()
    expected = _in_float32(model, IDS, **GREEDY)
    accelerate_for_cpu(model, dtype="float32")
    accelerate_for_cpu(other, dtype="int8")
    assert torch.equal(model.generate(IDS, **GREEDY, cache_implementation="static"), expected)
    assert torch.equal(model.generate(IDS[:1], **GREEDY, assistant_model=other)[0], expected[0])
    embeddings = restore(other).get_input_embeddings()(IDS)
    assert embeddings.dtype is torch.float16
    assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY), expected[:, IDS.shape[1] :])


def test_continuous_batching():
    model = CASES["llama"].build()
    expected = _in_float32(model, IDS, **GREEDY)[:, IDS.shape[1] :].tolist()
    accelerate_for_cpu(model, dtype="float32")
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(inputs=IDS.tolist(), generation_config=config)
    assert [output.generated_tokens for output in outputs.values()] == expected


@torch.no_grad()
def test_a_cache_that_eager_has_begun():
    model = CASES["opt"].build()
    cache = model(IDS).past_key_values
    expected = model(IDS[:, :1], past_key_values=copy.deepcopy(cache)).logits
    accelerate_for_cpu(model, dtype="float32")
    logits = model(IDS[:, :1], past_key_values=cache).logits
    assert logits.dtype is torch.float16
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
