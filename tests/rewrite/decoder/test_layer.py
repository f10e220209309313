"""Layers that run together: one op call for a stack, without a visible difference."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.rewrite.decoder.layer import FusedDecoderLayer
from tests.rewrite.decoder.decoder_families import DECODERS, LAYERS, padded
from tests.rewrite.decoder.llama_stack import BATCH, accelerated, llama, logits


def test_the_stack_is_one_call(lengths: list[int]) -> None:
    model = llama()
    expected = logits(model)
    accelerated(model)
    lengths.clear()
    assert row_error(logits(model, CPUCache(model.config)), expected) <= 1e-4
    assert lengths == [5]


def test_a_layer_that_is_left_has_those_before_it_computed(lengths: list[int]) -> None:
    model = llama()
    expected = logits(model)
    accelerate_for_cpu(model, dtype="float32", skip_modules=("model.layers.2",))
    lengths.clear()
    assert row_error(logits(model, CPUCache(model.config)), expected) <= 1e-4
    assert lengths == [2, 2]


def test_class_paths_and_state_dict_are_kept() -> None:
    model = llama()
    keys, kind = list(model.state_dict()), type(model.model.layers[0])
    accelerated(model)
    assert list(model.state_dict()) == keys
    assert all(isinstance(layer, kind) for layer in model.model.layers)


@torch.no_grad()
def test_a_model_that_stops_early(lengths: list[int]) -> None:
    model = llama()
    model.config.num_hidden_layers = 3
    expected = logits(model)
    model.config.num_hidden_layers = 5
    accelerated(model)
    cache = CPUCache(model.config)
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 3
    lengths.clear()
    assert row_error(logits(model, cache), expected) <= 1e-4
    assert lengths == [3]
    assert [layer.length for layer in cache.layers] == [9, 9, 9, 0, 0]


@torch.no_grad()
def test_a_failure_between_layers_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerated(llama())
    expected = logits(model)
    original = FusedDecoderLayer._understand

    def fail(layer: FusedDecoderLayer, *call: object) -> object:
        if layer is model.model.layers[3]:
            raise KeyboardInterrupt
        return original(layer, *call)

    cache = CPUCache(model.config)
    monkeypatch.setattr(FusedDecoderLayer, "_understand", fail)
    with pytest.raises(KeyboardInterrupt):
        logits(model, cache)
    monkeypatch.undo()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, cache), expected)


@pytest.mark.parametrize("place", ["layer", "inside"])
@torch.no_grad()
def test_hooks_are_called_and_may_change_what_they_see(place: str) -> None:
    model = llama()

    def install() -> list[Tensor]:
        seen: list[Tensor] = []

        def double(module: nn.Module, args: object, output: Tensor) -> Tensor:
            seen.append(output)
            return output * 2

        layer = model.model.layers[1]
        (layer if place == "layer" else layer.mlp).register_forward_hook(double)
        return seen

    reference = copy.deepcopy(model)
    accelerated(model)
    seen = install()
    doubled = logits(model, CPUCache(model.config))
    model, ours = reference, seen[0]
    theirs = install()
    expected = logits(model)
    assert row_error(doubled, expected) <= 1e-4
    assert row_error(ours, theirs[0]) <= 1e-4


def test_copies_and_pickles_work_and_are_independent() -> None:
    model = llama()
    before = logits(model)
    accelerate_for_cpu(model, dtype="float32", originals="memory")
    ours = logits(model, CPUCache(model.config))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(isinstance(layer, FusedDecoderLayer) for layer in twin.model.layers)
        assert torch.equal(logits(twin, CPUCache(model.config)), ours)
        restore(twin)
        assert torch.equal(logits(twin), before)
    assert torch.equal(logits(model, CPUCache(model.config)), ours)


def test_a_cast_model_uses_its_new_weights() -> None:
    model = llama()
    accelerate_for_cpu(model, dtype="bfloat16", originals="memory")
    full = logits(model, CPUCache(model.config))
    model.to(torch.bfloat16)
    half = logits(model, CPUCache(model.config))
    assert half.dtype is torch.bfloat16
    assert torch.cosine_similarity(half.float().flatten(), full.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("padding", ["full", "left", "far left", "right"])
def test_beyond_the_window_the_stack_stays_one_call(family: str, padding: str, lengths: list[int]) -> None:
    """Gemma 2's masks of layers with a window have values, and say nothing about keys that no query sees any more."""
    model = DECODERS[family].build()
    batch = padded(20)["full" if padding == "far left" else padding]
    if padding == "far left":
        batch["attention_mask"][0, :15] = 0
    expected = model.generate(**batch, max_new_tokens=20, do_sample=False)
    accelerated(model)
    lengths.clear()
    assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False), expected)
    assert sum(lengths) == 20 * LAYERS
    if padding != "right":
        assert lengths == [LAYERS] * 20


@pytest.mark.parametrize("beams", [1, 3])
def test_repeated_heads_are_stored_once(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon 40B hands each head of keys to the cache several times, where its own forward runs, which may be at any step."""
    model, batch = DECODERS["falcon-40b"].build(), padded()["left"]
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "return_dict_in_generate": True}
    expected = model.generate(**batch, **options).sequences
    accelerated(model)
    understand, steps = FusedDecoderLayer._understand, []

    def now_and_then(self: FusedDecoderLayer, *args: object) -> object:
        steps.append(None)
        return None if (len(steps) - 1) // LAYERS % 3 == 2 else understand(self, *args)

    for function in (understand, now_and_then):
        monkeypatch.setattr(FusedDecoderLayer, "_understand", function)
        output = model.generate(**batch, **options)
        assert torch.equal(output.sequences, expected)
        layer = output.past_key_values.layers[0]
        assert layer.key_storage.shape[1] == 2
        assert layer.keys.shape[1] == 4
    assert len(steps) == 12 * LAYERS


@torch.no_grad()
def test_masks_of_the_callers_own_take_the_layers_own_forward(lengths: list[int]) -> None:
    model = llama()
    mask = torch.zeros(2, 1, 9, 9)
    mask[:, :, :, 2] = torch.finfo(torch.float32).min
    ids = BATCH["input_ids"]
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    accelerated(model)
    lengths.clear()
    assert row_error(model(ids, attention_mask=mask, use_cache=False).logits, expected) <= 1e-4
    assert lengths == []


def test_threads_may_share_a_model() -> None:
    model = accelerated(llama())
    expected = logits(model, CPUCache(model.config))
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(5):
            results.append(logits(model, CPUCache(model.config)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    assert all(torch.equal(result, expected) for result in results)


def test_training_and_gradients_are_refused() -> None:
    model = accelerated(llama())
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model(inputs_embeds=torch.randn(1, 3, 64, requires_grad=True))


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    model, other = accelerated(llama()), accelerated(DECODERS["qwen3"].build())
    cache = CPUCache(model.config)
    logits(model, cache)
    with pytest.raises(ValueError, match="past_key_values"):
        logits(other, cache)


@pytest.mark.parametrize("padding", ["skip", "compute"])
def test_left_padding_is_computed_where_asked_for(lengths: list[int], padding: str) -> None:
    """Then the layers run on their own, for batches that have such padding only."""
    model, batch = llama(), padded()["left"]
    expected = model(**batch, use_cache=False).logits
    accelerate_for_cpu(model, dtype="float32", padding=padding)
    lengths.clear()
    given = model(**batch, use_cache=False).logits
    assert bool(lengths) == (padding == "skip")
    tokens = batch["attention_mask"].bool()
    assert row_error(given[tokens], expected[tokens]) <= 1e-4
    if padding == "compute":
        assert row_error(given[~tokens], expected[~tokens]) <= 1e-4
    lengths.clear()
    logits(model)
    assert lengths == [5]
