"""Layers that use the keys and values of earlier ones, and their own input (Gemma 4), in one call with those."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from tests.rewrite.decoder.decoder_families import UNSCALED, VOCABULARY, Decoder, padded

LAYERS = 8
KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)
BATCH = padded()["full"]


def gemma4(seed: int = 0, **settings: object) -> nn.Module:
    """Four layers and four that take the keys of the two before them, which see 6 tokens or all of them."""
    family = UNSCALED["gemma4"]
    sizes = {
        "num_hidden_layers": LAYERS,
        "layer_types": KINDS,
        "num_kv_shared_layers": 4,
        "sliding_window": 6,
    }
    model = Decoder(family.stem, {**family.settings, **sizes, **settings}, config=family.config).build(seed)
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.6 + 0.1 * number)
    return model


def prompt(batch: int, tokens: int, *, is_padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    for number in range(batch if is_padded else 0):
        mask[number, : 3 * number + 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]], ids=["full last", "window last"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
@torch.no_grad()
def test_greedy_tokens(batch: int, is_padded: bool, kinds: list[str], lengths: list[int]) -> None:
    model, given = gemma4(1, layer_types=kinds), prompt(batch, 20, is_padded=is_padded)
    options = {"max_new_tokens": 128, "do_sample": False}
    expected = model.generate(**given, **options)
    accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(model.generate(**given, **options), expected)
    restore(model)
    accelerate_for_cpu(model, dtype="float32", speculate="off")
    assert explain(model).counts()["decoder layer"] == LAYERS
    lengths.clear()
    assert torch.equal(model.generate(**given, **options), expected)
    # Of a prompt, only the last token goes through the layers that put nothing into the cache.
    assert lengths == [4, 4, *[LAYERS] * 127]
    own = model.generate(**given, **options, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(own, expected)
    assert torch.equal(model.generate(**given, **options, cache_implementation="static"), expected)


@torch.no_grad()
def test_caches(lengths: list[int]) -> None:
    model = gemma4()
    eager, config = copy.deepcopy(model), model.config
    accelerate_for_cpu(model, dtype="float32")

    def both(ours: object, theirs: object, ids: Tensor) -> None:
        outputs = [
            m(ids, past_key_values=c, use_cache=True).logits for m, c in ((model, ours), (eager, theirs))
        ]
        assert row_error(*outputs) <= 1e-4

    for kind in (CPUCache, DynamicCache):
        ours, theirs = (
            kind(config=config) if kind is DynamicCache else kind(config),
            DynamicCache(config=config),
        )
        for ids in (BATCH["input_ids"], BATCH["input_ids"][:, :1], BATCH["input_ids"][:, :4]):
            lengths.clear()
            both(ours, theirs, ids)
            # Behind the fourth the model cuts several tokens, which has them computed.
            assert lengths == ([4, 4] if ids.shape[1] > 1 else [LAYERS])
    # Stock code goes on from us, and we from stock code.
    both(theirs, ours, BATCH["input_ids"][:, :2])
    both(ours, theirs, BATCH["input_ids"][:, 2:3])
    static = [StaticCache(config=config, max_cache_len=32) for _ in range(2)]
    for ids in (BATCH["input_ids"], BATCH["input_ids"][:, :1]):
        both(*static, ids)


@torch.no_grad()
def test_a_cropped_cache() -> None:
    model = gemma4(sliding_window=64)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    outputs = []
    for m, cache in ((model, CPUCache(model.config)), (eager, DynamicCache(config=model.config))):
        m(**BATCH, past_key_values=cache, use_cache=True)
        cache.crop(-4)
        outputs.append(m(BATCH["input_ids"][:, :3], past_key_values=cache, use_cache=True).logits)
    assert row_error(*outputs) <= 1e-4


def left(model: nn.Module, number: int) -> None:
    accelerate_for_cpu(model, dtype="float32", skip_modules=(f"model.layers.{number}",))


def watched(model: nn.Module, number: int) -> None:
    accelerate_for_cpu(model, dtype="float32")
    model.model.layers[number].mlp.register_forward_hook(lambda module, args, output: output)


def seen(model: nn.Module, number: int) -> None:
    accelerate_for_cpu(model, dtype="float32")
    model.model.layers[number].register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("change", [left, watched, seen])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 6])
@torch.no_grad()
def test_a_layer_that_runs_alone(change: Callable[[nn.Module, int], None], number: int) -> None:
    """Before, as and behind those whose keys are taken: then the others find what its own forward leaves, and it theirs."""
    model = gemma4()
    eager = copy.deepcopy(model)
    change(model, number)
    caches = CPUCache(model.config), DynamicCache(config=model.config)
    for ids in (BATCH["input_ids"], *BATCH["input_ids"][:, :3].split(1, dim=1)):
        outputs = [
            m(ids, past_key_values=c, use_cache=True).logits
            for m, c in zip((model, eager), caches, strict=True)
        ]
        assert row_error(*outputs) <= 1e-4


@torch.no_grad()
def test_keys_that_the_model_hands_out() -> None:
    model = gemma4().model
    expected = model(**BATCH, return_shared_kv_states=True).shared_kv_states
    accelerate_for_cpu(model, dtype="float32")
    given = model(**BATCH, return_shared_kv_states=True).shared_kv_states
    assert list(given) == list(expected)
    for kind, pair in expected.items():
        for ours, theirs in zip(given[kind], pair, strict=True):
            assert row_error(ours, theirs) <= 1e-4


@pytest.mark.filterwarnings("error:.*fused by hf_cpu_accel:RuntimeWarning")
@torch.no_grad()
def test_bfloat16_is_no_farther_from_float32_than_eager() -> None:
    """Rounding between its ops moves a layer whose scores are not scaled by more than is allowed of a fused one."""
    for seed in range(3):
        model = gemma4(seed)
        exact, eager = model(**BATCH).logits, copy.deepcopy(model).bfloat16()
        accelerate_for_cpu(model.bfloat16(), dtype="bfloat16")
        assert explain(model).counts()["decoder layer"] == LAYERS
        ours, theirs = (m(**BATCH).logits.float() for m in (model, eager))
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@torch.no_grad()
def test_a_scale_that_is_written_to() -> None:
    model = gemma4()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    before = model(**BATCH).logits
    for m in (model, eager):
        m.model.layers[2].layer_scalar.fill_(0.2)
    after = model(**BATCH).logits
    assert row_error(after, eager(**BATCH).logits) <= 1e-4
    assert row_error(after, before) > 1e-2
    restore(model)
    assert torch.equal(model(**BATCH).logits, eager(**BATCH).logits)


@torch.no_grad()
def test_layers_without_an_input_of_their_own() -> None:
    """As in the larger Gemma 4: keys are values, too, where a layer sees all tokens."""
    model = gemma4(hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts()["decoder layer"] == LAYERS
    assert row_error(model(**BATCH).logits, eager(**BATCH).logits) <= 1e-4
