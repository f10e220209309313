"""Every family of decoders: the number of fused layers, and equal prompts, steps and greedy tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite.core.refusal import RECORDED
from hf_cpu_accel.rewrite.decoder.fuse import STRUCTURE
from tests.rewrite.decoder.decoder_families import (
    DECODERS,
    LAYERS,
    SCALED,
    UNFUSED,
    UNSCALED,
    VOCABULARY,
    Decoder,
    padded,
)

fused_or_not = pytest.mark.parametrize(
    "family",
    [*DECODERS.values(), *UNSCALED.values(), *UNFUSED.values()],
    ids=[*DECODERS, *UNSCALED, *UNFUSED],
)


@pytest.fixture(scope="module", params=DECODERS.values(), ids=DECODERS)
def built(request: pytest.FixtureRequest) -> tuple[Decoder, nn.Module, Tensor]:
    """(family, its model, what `prompt_and_steps` gives for that), once for all dtypes; the model is to be copied."""
    family: Decoder = request.param
    # With seed 0 rounding to bfloat16 sends tokens of gpt-oss to other experts, in torch's own model as well.
    model = family.build(seed=7)
    return family, model, prompt_and_steps(model, padded()["left"], DynamicCache(config=model.config))


STEPS = (1, 1, 1, 4, 1, 1, 1)


def fused_layers(model: nn.Module) -> int:
    return sum(item.structure == STRUCTURE and item.reason is None for item in explain(model).items)


@torch.no_grad()
def prompt_and_steps(model: nn.Module, batch: dict[str, Tensor], cache: object) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt, of single tokens after it and of several at once, without those of padding."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    generator = torch.Generator().manual_seed(0)
    logits = []
    for step in (None, *STEPS):
        if step is not None:
            ids = torch.randint(3, VOCABULARY, (len(ids), step), generator=generator)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        outputs = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits.append(outputs.logits[mask[:, -ids.shape[1] :].bool()])
    return torch.cat(logits)


@fused_or_not
@torch.no_grad()
def test_same_logits_in_float32(family: Decoder) -> None:
    model = family.build()
    batches, config = padded(), model.config
    expected = {
        name: prompt_and_steps(model, batch, DynamicCache(config=config)) for name, batch in batches.items()
    }
    without = {name: model(**batch, use_cache=False).logits for name, batch in batches.items()}
    accelerate_for_cpu(model, dtype="float32")
    assert fused_layers(model) == family.fused
    left = sum(item.structure == STRUCTURE for item in explain(model).left)
    recorded = explain(model).counts().get(RECORDED, 0)
    assert left + recorded == LAYERS - family.fused - family.cached
    for name, batch in batches.items():
        for cache in (CPUCache(config), DynamicCache(config=config)):
            assert row_error(prompt_and_steps(model, batch, cache), expected[name]) <= 1e-4, name
        tokens = batch["attention_mask"].bool()
        logits = model(**batch, use_cache=False).logits
        assert row_error(logits[tokens], without[name][tokens]) <= 1e-4, name
    restore(model)
    again = prompt_and_steps(model, batches["left"], DynamicCache(config=config))
    assert torch.equal(again, expected["left"])


@fused_or_not
@pytest.mark.filterwarnings(
    "error:.*fused by hf_cpu_accel:RuntimeWarning"
)  # no layer goes back to its own forward
@torch.no_grad()
def test_same_greedy_tokens(family: Decoder) -> None:
    model = family.build(seed=1)
    # The cache holds 128 tokens from such a prompt on, and grows once.
    batch, options = padded(63)["left"], {"max_new_tokens": 70, "do_sample": False}
    expected = model.generate(**batch, **options)
    accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(model.generate(**batch, **options), expected)


def test_layers_that_choose_groups_of_experts_run_around_attention() -> None:
    model = accelerate_for_cpu(UNFUSED["glm4-moe-groups"].build(), dtype="float32")
    fused = [item.structure for item in explain(model).items if item.reason is None]
    assert fused.count("cached layer") == LAYERS


@pytest.mark.parametrize("family", SCALED.values(), ids=SCALED)
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_scaled_rotary_positions(family: Decoder, beams: int, lengths: list[int]) -> None:
    """Run twice: some models restart with shorter sequences, and compute all tokens again with other frequencies."""
    model, batch = family.build(seed=1), padded()["left"]
    options = {"max_new_tokens": 128 if beams == 1 else 40, "do_sample": False, "num_beams": beams}
    expected = model.generate(**batch, **options)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(2):
        lengths.clear()
        assert torch.equal(model.generate(**batch, **options), expected)
        assert lengths == [LAYERS] * options["max_new_tokens"]


@pytest.mark.parametrize(
    ("dtype", "similarity"), [("bfloat16", 0.999), ("int8", 0.998), ("int8-weight", 0.998), ("int4", 0.9)]
)
@torch.no_grad()
def test_reduced_precision_stays_close(
    built: tuple[Decoder, nn.Module, Tensor], dtype: str, similarity: float
) -> None:
    family, eager, expected = built
    model = copy.deepcopy(eager)
    accelerate_for_cpu(model, dtype=dtype)
    assert fused_layers(model) == family.fused
    logits = prompt_and_steps(model, padded()["left"], CPUCache(model.config))
    # Where scores are nearly the same, rounding sends tokens to other experts.
    similarity = min(similarity, 0.99) if family.routes else similarity
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) >= similarity


@torch.no_grad()
def test_models_in_bfloat16(built: tuple[Decoder, nn.Module, Tensor]) -> None:
    family, eager, expected = built
    model = copy.deepcopy(eager)
    model.to(torch.bfloat16)
    accelerate_for_cpu(model, dtype="bfloat16")
    assert fused_layers(model) == family.fused
    logits = prompt_and_steps(model, padded()["left"], CPUCache(model.config))
    assert logits.dtype is torch.bfloat16
    assert torch.cosine_similarity(logits.float().flatten(), expected.flatten(), dim=0) >= 0.995
