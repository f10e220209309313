"""Times of tokens, and what a token costs at least."""

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.measure.generation import Generated, TokenClock, generate, plain_greedy
from hf_cpu_accel.measure.generation_cost import Cost, StepWeight, bytes_per_weight, cost, peak_of
from hf_cpu_accel.runtime.hardware import Peaks


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=5,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def inputs(batch: int = 1, prompt: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(10, 90, (batch, prompt))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_the_clock_leaves_the_prompt_out() -> None:
    clock = TokenClock()
    clock.put(torch.zeros(1, 7))
    assert clock.times == []
    for _ in range(3):
        clock.put(torch.zeros(1))
    clock.end()
    assert len(clock.times) == 3
    assert clock.times == sorted(clock.times)


@pytest.mark.parametrize("batch", [1, 3])
def test_every_token_after_the_first_has_a_time(batch: int) -> None:
    model = llama()
    plain_greedy(model)
    run = generate(model, inputs(batch), 6)
    assert len(run.steps) == 5
    assert run.first > 0
    assert min(run.steps) > 0
    assert run.step == pytest.approx(sum(run.steps) / 5)
    assert Generated(1.0, (0.1, 0.3)).step == pytest.approx(0.2)


def test_nothing_of_the_models_own_settings_ends_a_run_early() -> None:
    model = llama()
    model.generation_config.update(num_beams=4, eos_token_id=list(range(96)), do_sample=True)
    plain_greedy(model)
    assert len(generate(model, inputs(), 9).steps) == 8


def test_too_few_tokens_are_refused_and_missing_ones_noticed() -> None:
    model = llama()
    with pytest.raises(ValueError, match="new=1"):
        generate(model, inputs(), 1)
    model.generation_config.eos_token_id = list(range(96))  # ends at the first token
    with pytest.raises(RuntimeError, match="1 tokens were generated, expected 4"):
        generate(model, inputs(), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_reads_its_linear_layers_and_the_head_but_no_table(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    plain_greedy(model)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    found = cost(model, inputs(prompt=7))
    assert sum(w.out_features * w.in_features for w in found.step_weights) == 2 * layer + 96 * 64
    assert found.first_flops == 2 * (7 * 2 * layer + 96 * 64)  # the head for the last token alone


def test_merged_projections_of_gpt2_are_seen() -> None:
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain_greedy(model)
    found = {(w.out_features, w.in_features) for w in cost(model, inputs()).step_weights}
    assert found == {(192, 64), (64, 64), (256, 64), (64, 256), (96, 64)}


def test_an_encoder_is_not_read_again() -> None:
    config = BartConfig(
        vocab_size=96,
        d_model=64,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    plain_greedy(model)
    # Self-attention's four, query and output of cross-attention, two of the FFN, the head.
    assert len(cost(model, inputs()).step_weights) == 9


def test_bytes_are_those_of_packed_weights() -> None:
    assert bytes_per_weight("float32") == 4
    assert bytes_per_weight("bfloat16") == 2
    assert 1 < bytes_per_weight("int8") < 1.02
    found = cost(llama(), inputs())
    assert found.step_bytes("bfloat16") == 2 * sum(w.out_features * w.in_features for w in found.step_weights)


def test_each_weight_counts_as_it_is_packed() -> None:
    head, first, second = (
        StepWeight(("embed", "lm_head"), 320, 64),
        StepWeight(("layers.0.up",), 128, 64),
        StepWeight(("layers.0.gate",), 8, 64),
    )
    found = Cost(0, (head, first, second))
    assert found.step_bytes("bfloat16") == 2 * 64 * (320 + 128 + 8)
    packed = {"lm_head": "int8", "layers.0.up": "int4"}
    int8, int4 = bytes_per_weight("int8", 64), bytes_per_weight("int4", 64)
    assert found.step_bytes("float32", packed) == 64 * (320 * int8 + 128 * int4 + 8 * 4)


@torch.no_grad()
def test_an_accelerated_model_reads_its_head_in_the_heads_dtype() -> None:
    model = llama()
    plain_greedy(model)
    needs = cost(model, inputs())
    accelerate_for_cpu(model, dtype="int4", head_dtype="bfloat16")
    plan = explain(model)
    # What the table of the embeddings and the head share is packed once.
    assert needs.step_bytes("float32", plan.packed_dtypes) == plan.packed_bytes
    assert plan.packed_dtypes["lm_head"] == "bfloat16"


def test_the_peak_is_that_of_the_arithmetic_which_serves() -> None:
    peaks = Peaks(float32=200, bfloat16=100, int8=900, read_bandwidth=50, threads=2)
    assert [peak_of(peaks, dtype) for dtype in ("float32", "bfloat16", "int8-weight", "int8", "int4")] == [
        200,
        200,
        200,
        900,
        900,
    ]
