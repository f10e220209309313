"""`generate_batch` with this package's attention over transformers' pages, compared with transformers."""

import pytest
import torch
import transformers

from hf_cpu_accel.rewrite.attention import paged
from tests.generate.decoders import END, PAD, VOCABULARY, accelerated, eager

MODELS = ("llama", "qwen3", "mistral", "gpt2", "phi3")  # Mistral slides


def prompts(count=7, longest=60):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    texts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [*texts, texts[2] + [9]]  # begins as another one: pages are shared


def generate(model, asked, tokens=12, **config):
    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=END, pad_token_id=PAD
    )
    # Small pages and few tokens at once: prompts come in pieces, beside others that decode.
    small = transformers.ContinuousBatchingConfig(
        **{"num_blocks": 40, "page_size": 16, "max_batch_tokens": 32, **config}
    )
    outputs = model.generate_batch(
        asked, generation_config=settings, continuous_batching_config=small, progress_bar=False
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture
def calls(monkeypatch):
    """How many tokens and sequences each call of our attention had."""
    op, calls = paged.paged_attention, []

    def counted(query, *args, **kwargs):
        calls.append((len(query), len(kwargs["query_begin"]) - 1))
        return op(query, *args, **kwargs)

    monkeypatch.setattr(paged, "paged_attention", counted)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_own(name, calls):
    asked = prompts()
    expected = generate(eager(name), asked)
    assert all(expected)  # a failure in transformers' own session gives no tokens
    assert not calls
    assert generate(accelerated(name), asked) == expected
    assert max(sequences for _, sequences in calls) > 3
    assert max(tokens for tokens, _ in calls) > 16


def test_afterwards_generate_works_as_before():
    model, ids = accelerated("llama"), torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, do_sample=False, max_new_tokens=5)
    implementation = model.config._attn_implementation
    for _ in range(2):
        generate(model, [[5, 6, 7]], tokens=5)
        assert model.config._attn_implementation == implementation == "hf_cpu_accel"
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=5), expected)


def test_a_session_that_cannot_start_leaves_the_model_as_it_was():
    model = accelerated("llama")
    with pytest.raises((TypeError, AttributeError)):
        model.init_continuous_batching(generation_config=3)
    assert model.config._attn_implementation == "hf_cpu_accel"


def test_no_mask_of_all_tokens_by_all_keys_is_made(monkeypatch):
    from transformers.generation.continuous_batching import input_outputs

    made = []
    monkeypatch.setattr(input_outputs, "build_attention_mask", lambda **given: made.append(given))
    generate(accelerated("llama"), [[5, 6, 7]], tokens=3)
    assert not made
