"""Caches of transformers, created by `model(**inputs)` or passed in: layers are fused, and other code can continue from them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_cpu_accel import restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.host_layers import storage_of
from tests.rewrite.decoder.decoder_families import DECODERS, LAYERS, VOCABULARY, Decoder, padded
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.decoder.llama_stack import BATCH, accelerated, llama, logits

MORE = torch.arange(6).view(2, 3) + 5


def window(tokens: int = 6) -> nn.Module:
    family = DECODERS["mistral"]
    return Decoder(family.stem, {**family.settings, "sliding_window": tokens}).build()


@torch.no_grad()
def step(model: nn.Module, cache: object, ids: Tensor = MORE) -> Tensor:
    return model(ids, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def test_a_plain_call_is_one_call_of_the_op(lengths: list[int]) -> None:
    model = llama()
    expected = model(**BATCH)
    accelerated(model)
    lengths.clear()
    outputs = model(**BATCH)
    assert lengths == [5]
    assert type(outputs.past_key_values) is DynamicCache
    assert row_error(outputs.logits, expected.logits) <= 1e-4
    for ours, theirs in zip(outputs.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert row_error(ours.keys, theirs.keys) <= 1e-4
        assert row_error(ours.values, theirs.values) <= 1e-4
    labels = torch.where(BATCH["attention_mask"].bool(), BATCH["input_ids"], -100)
    assert torch.isfinite(model(**BATCH, labels=labels).loss)
    assert row_error(model(**BATCH, logits_to_keep=1).logits, outputs.logits[:, -1:]) <= 1e-5
    assert lengths == [5, 5, 5]


@pytest.mark.parametrize("build", [llama, window], ids=["all tokens", "window"])
@torch.no_grad()
def test_stock_code_goes_on_from_us_and_we_from_stock_code(
    build: Callable[[], nn.Module], lengths: list[int]
) -> None:
    model = build()
    eager, layers = copy.deepcopy(model), model.config.num_hidden_layers
    accelerated(model)
    there, here = eager(**BATCH).past_key_values, model(**BATCH).past_key_values
    expected = [step(eager, copy.deepcopy(there), ids) for ids in (MORE, MORE[:, :1])]
    for ids, wanted in zip((MORE, MORE[:, :1]), expected, strict=True):
        for runs, cache in ((eager, here), (model, there), (model, here)):
            lengths.clear()
            assert row_error(step(runs, copy.deepcopy(cache), ids), wanted) <= 1e-4
            assert lengths == ([layers] if runs is model else [])


@pytest.mark.parametrize("build", [llama, window], ids=["all tokens", "window"])
@torch.no_grad()
def test_tokens_one_by_one(build: Callable[[], nn.Module], lengths: list[int]) -> None:
    """So many that the storage grows, and that tokens leave the window."""
    model = build()
    eager = copy.deepcopy(model)
    accelerated(model)
    ours, theirs = DynamicCache(config=model.config), DynamicCache(config=model.config)
    assert row_error(logits(model, ours), logits(eager, theirs)) <= 1e-4
    storages = set()
    lengths.clear()
    for number in range(150):
        ids = torch.full((2, 1), number % VOCABULARY)
        assert row_error(step(model, ours, ids), step(eager, theirs, ids)) <= 1e-4
        assert ours.get_seq_length() == theirs.get_seq_length()
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert mine.keys.shape == other.keys.shape
        storages.add(ours.layers[0].keys.untyped_storage().data_ptr())
    assert lengths == [model.config.num_hidden_layers] * 150
    assert len(storages) <= 4  # not one per token, as by concatenation


@torch.no_grad()
def test_a_cache_without_a_config_gets_its_layers(lengths: list[int]) -> None:
    model = llama()
    expected = logits(model)
    accelerated(model)
    lengths.clear()
    cache = DynamicCache()
    assert row_error(logits(model, cache), expected) <= 1e-4
    assert lengths == [5]
    assert [layer.get_seq_length() for layer in cache.layers] == [BATCH["input_ids"].shape[1]] * 5


def _crop(cache: DynamicCache) -> None:
    cache.crop(-2)


def _swap(cache: DynamicCache) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def _select(cache: DynamicCache) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def _repeat(cache: DynamicCache) -> None:
    cache.batch_repeat_interleave(2)


def _reset(cache: DynamicCache) -> None:
    cache.reset()


@pytest.mark.parametrize("change", [_crop, _swap, _select, _repeat, _reset])
@torch.no_grad()
def test_what_is_done_to_a_cache_between_calls(change: Callable[[DynamicCache], None]) -> None:
    model = llama()
    eager = copy.deepcopy(model)
    accelerated(model)
    caches = []
    for runs in (model, eager):
        cache = DynamicCache(config=model.config)
        step(runs, cache)
        step(runs, cache)  # has room behind it
        change(cache)
        caches.append(cache)
    for _ in range(2):
        rows = caches[0].layers[0].keys.shape[0] if caches[0].get_seq_length() else 2
        ids = MORE[:1].expand(rows, -1)
        assert row_error(step(model, caches[0], ids), step(eager, caches[1], ids)) <= 1e-4


@torch.no_grad()
def test_branches_of_one_prefix_do_not_write_over_one_another() -> None:
    model = accelerated(llama())
    trunk = DynamicCache(config=model.config)
    step(model, trunk)
    step(model, trunk)  # has room behind it
    expected = step(model, copy.deepcopy(trunk), MORE + 1)
    kept = [layer.keys for layer in trunk.layers]
    before = [keys.clone() for keys in kept]
    branches = []
    for _ in range(2):
        branch = copy.copy(trunk)
        branch.layers = [copy.copy(layer) for layer in trunk.layers]
        branches.append(branch)
    pickled = pickle.loads(pickle.dumps(trunk))
    step(model, trunk)
    step(model, branches[0], MORE + 2)
    assert torch.equal(step(model, branches[1], MORE + 1), expected)
    assert torch.equal(step(model, pickled, MORE + 1), expected)
    assert all(map(torch.equal, kept, before))


@torch.no_grad()
def test_a_window_that_records_its_past(lengths: list[int]) -> None:
    model = window()
    eager = copy.deepcopy(model)
    accelerated(model)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        for layer in cache.layers:
            layer.activate_past_recording()
    ours, theirs = caches
    for ids, removed in ((BATCH["input_ids"], 0), (MORE, -2), (MORE, -1), (MORE, 0)):
        assert row_error(step(model, ours, ids), step(eager, theirs, ids)) <= 1e-4
        for cache in caches:
            cache.crop(removed)
        assert ours.layers[0].keys.shape == theirs.layers[0].keys.shape
    assert lengths[-4:] == [LAYERS] * 4


@pytest.mark.parametrize("side", ["full", "left"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_a_static_cache(family: str, side: str, lengths: list[int]) -> None:
    model = DECODERS[family].build()
    batch, eager = padded()[side], copy.deepcopy(model)
    accelerated(model)
    length = batch["input_ids"].shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 4, dtype=torch.long)], dim=1)
    written = []
    for runs in (model, eager):
        cache = StaticCache(config=model.config, max_cache_len=length + 4)
        first = runs(**batch, past_key_values=cache).logits[batch["attention_mask"].bool()]
        rest = [
            runs(MORE[:, :1], attention_mask=mask[:, : length + count], past_key_values=cache).logits[:, 0]
            for count in (1, 2)
        ]
        written.append(torch.cat([first, *rest]))
        assert int(cache.get_seq_length()) == length + 2
    assert row_error(*written) <= 1e-4
    if family != "gemma3":  # its layers with a window hold it in another order
        assert lengths[-3:] == [LAYERS] * 3


@torch.no_grad()
def test_a_static_cache_that_is_too_short() -> None:
    model = accelerated(llama())
    cache = StaticCache(config=model.config, max_cache_len=BATCH["input_ids"].shape[1] + 2)
    logits(model, cache)
    with pytest.raises(IndexError):  # transformers' own: such a mask does not say what the op computes
        step(model, cache)
    storage = storage_of(cache, 1)
    assert storage is not None
    with pytest.raises(
        ValueError, match="9 tokens and 3 new ones do not fit into a cache with max_cache_len=11"
    ):
        storage.reserve(2, 2, 16, 16, torch.float32, 3)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_a_cache_of_another_batch(kind: type) -> None:
    model = accelerated(llama())
    cache = DynamicCache() if kind is DynamicCache else StaticCache(config=model.config, max_cache_len=40)
    logits(model, cache)
    with pytest.raises(ValueError, match="past_key_values: this cache has batch size 2"):
        step(model, cache, MORE[:1])


@torch.no_grad()
def test_caches_that_do_something_of_their_own_are_called() -> None:
    model = llama()
    expected = logits(model)
    accelerated(model)

    class Counting(DynamicCache):
        updates = 0

        def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            self.updates += 1
            return super().update(*args, **kwargs)

    cache = Counting(config=model.config)
    assert row_error(logits(model, cache), expected) <= 1e-4
    assert cache.updates == 5


@torch.no_grad()
def test_ours_and_theirs_in_one_process() -> None:
    model = accelerated(llama())
    expected = logits(model, CPUCache(model.config))
    assert row_error(logits(model, DynamicCache(config=model.config)), expected) <= 1e-6


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@torch.no_grad()
def test_plain_calls_of_encoder_decoders(family: object, lengths: list[int]) -> None:
    model = family.build()
    inputs, ids = family.inputs(), torch.tensor([[3, 4, 5], [6, 7, 8]])
    expected = model(**inputs, decoder_input_ids=ids)
    accelerated(model)
    lengths.clear()
    outputs = model(**inputs, decoder_input_ids=ids)
    assert sum(lengths) == family.fused
    assert row_error(outputs.logits, expected.logits) <= 1e-4
    more = {"decoder_input_ids": ids[:, :1], "encoder_outputs": (outputs.encoder_last_hidden_state,)}
    more |= {name: value for name, value in inputs.items() if name == "attention_mask"}
    ours, theirs = (
        model(**more, past_key_values=copy.deepcopy(out.past_key_values)).logits
        for out in (outputs, expected)
    )
    restore(model)
    wanted = model(**more, past_key_values=copy.deepcopy(expected.past_key_values)).logits
    again = model(**more, past_key_values=outputs.past_key_values).logits
    for got in (ours, theirs, again):
        assert row_error(got, wanted) <= 1e-4
