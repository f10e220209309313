"""Dtypes of the KV cache: the choice, and every loop on it."""

import pytest
import torch

from hf_cpu_accel import explain
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.lazy.stored_heads import StoredHeads
from tests.generate.decoders import accelerated, prompt

GREEDY = {"do_sample": False, "max_new_tokens": 24}
MODELS = (
    "llama",
    "mistral",
    "gemma2",
    "gpt2",
    "bloom",
)  # Mistral and Gemma forget; of Bloom no layer is fused


def generated(model, **settings):
    """(what `generate` returns as an object, the storages of its cache)."""
    output = model.generate(
        **prompt(9, batch=2, padded=True),
        **GREEDY,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return output, [layer.key_storage for layer in output.past_key_values.layers]


@pytest.mark.parametrize(
    ("dtype", "kv_cache", "stored"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("int8", "auto", torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("int4", "float32", torch.float32),
        ("float32", "int8", torch.int8),
    ],
)
def test_narrow_weights_get_a_narrow_cache_and_choices_win(dtype, kv_cache, stored):
    model = accelerated("llama", dtype, kv_cache)
    assert {storage.dtype for storage in generated(model)[1]} == {stored}
    item = next(item for item in explain(model).items if item.structure == "KV cache")
    asked = "key dtype" if (dtype, kv_cache) == ("float32", "auto") else str(stored).removeprefix("torch.")
    assert item.dtype == asked


@pytest.mark.parametrize("kv_cache", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_the_error_is_that_of_the_storage(name, kv_cache):
    """Logits of the first tokens, as long as both write the same: sequences of several lengths, windows that forget."""
    wide, narrow = (generated(accelerated(name, "float32", kind))[0] for kind in ("float32", kv_cache))
    rows = torch.ones(2, dtype=torch.bool)
    for step, (expected, logits) in enumerate(zip(wide.logits, narrow.logits, strict=True)):
        error = (logits - expected)[rows].norm() / expected[rows].norm()
        assert error < 0.04, step
        rows &= wide.sequences[:, 9 + step] == narrow.sequences[:, 9 + step]
        if not rows.any():
            break
    assert step > 0


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_beams_speculation_and_prefixes_work_in_8_bits(name):
    model = accelerated(name, "float32", "int8")
    inputs = prompt(9, batch=2, padded=True)
    for settings in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        tokens = model.generate(**inputs, **{**GREEDY, **settings})
        assert tokens.shape[1] > 9
    single = prompt(20)
    expected = model.generate(**single, **GREEDY)
    # Looking tokens up in the prompt takes guesses back; what is stored of the others stays, so the tokens do.
    guessed = model.generate(**single, **GREEDY, prompt_lookup_num_tokens=3)
    assert guessed.tolist() == expected.tolist()
    cache = CPUCache(model.config, dtype=torch.int8)
    with torch.inference_mode():
        model(single["input_ids"][:, :12], past_key_values=cache)
    assert model.generate(**single, **GREEDY, past_key_values=cache).tolist() == expected.tolist()


def test_layers_that_are_not_fused_read_the_storage_in_our_attention(monkeypatch):
    def converted(self):
        raise AssertionError("all keys were converted")

    monkeypatch.setattr(StoredHeads, "_make", converted)
    model = accelerated("llama", "float32", "int8")
    calls = []
    # Somebody who looks inside of a layer has it run step by step.
    hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *arguments: calls.append(1))
    try:
        generated(model)
    finally:
        hook.remove()
    assert len(calls) == GREEDY["max_new_tokens"]
