"""The well-known shapes are the published ones."""

import pytest
import torch

from hf_cpu_accel.cli import random_models

# Millions of parameters without a head, with the pooler where the architecture has one.
_PUBLISHED = {
    "bert-tiny": 4.4,
    "bert-base-uncased": 109.5,
    "bert-large-uncased": 335.1,
    "all-MiniLM-L6-v2": 22.7,
    "distilbert-base-uncased": 66.4,
    "roberta-base": 124.6,
    "xlm-roberta-base": 278.0,
    "albert-base-v2": 11.7,
    "electra-small-discriminator": 13.5,
    "mpnet-base": 109.5,
    "deberta-v3-small": 141.3,
    "deberta-v3-base": 183.8,
    "ModernBERT-base": 149.0,
    "embeddinggemma-300m": 302.9,
    "Qwen3-Embedding-0.6B": 595.8,
    "mobilebert-uncased": 24.6,
    "conv-bert-base": 105.7,
    "xlnet-base-cased": 116.7,
    "roformer_chinese_base": 123.6,
    "rembert": 575.9,
    "squeezebert-uncased": 51.1,
    "gpt2": 124.4,
    "Qwen2.5-0.5B": 494.0,
    "Qwen3-0.6B": 596.0,
    "Qwen3.5-0.8B": 752.4,
    "Llama-3.2-1B": 1235.8,
    "LFM2-1.2B": 1170.3,
    "Granite-4.0-H-1B": 1461.5,
    "Gemma-4-E2B": 2565.0,  # with a quarter of its vocabulary
    "DeepSeek-V2-Lite-5-layers": 2630.1,
    "SmolLM3-3B": 3075.1,
    "SmolLM2-135M": 134.5,
    "SmolLM2-360M": 361.8,
    "t5-small": 60.5,
    "bart-base": 139.4,
}


@pytest.mark.parametrize("name", random_models.NAMES)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        model = random_models.build(name)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(_PUBLISHED[name], abs=0.06)


def test_build_is_seeded_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, again, other = (random_models.build("bert-tiny", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(
        weights[0]["embeddings.word_embeddings.weight"], weights[2]["embeddings.word_embeddings.weight"]
    )
    assert not first.training


def test_weights_have_the_requested_dtype() -> None:
    model = random_models.build("bert-tiny", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_configuration_is_not_shared() -> None:
    random_models.config("Qwen2.5-0.5B").rope_parameters["rope_theta"] = 1.0
    assert random_models.config("Qwen2.5-0.5B").rope_parameters["rope_theta"] == 1e6


def test_no_bias_or_norm_weight_is_degenerate() -> None:
    for name, parameter in random_models.build("bert-tiny").named_parameters():
        if parameter.ndim == 1:
            assert parameter.std() > 0.01, name


def test_unknown_names_list_the_accepted_ones() -> None:
    with pytest.raises(ValueError, match=r"random_config='bert-huge'.*bert-base-uncased"):
        random_models.build("bert-huge")
