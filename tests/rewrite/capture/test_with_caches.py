"""Decoder layers of unknown form are recorded with their use of the cache: equal tokens, and caches shared with eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    RoFormerConfig,
    RoFormerForCausalLM,
    StaticCache,
)

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.rewrite.capture.program import Program
from hf_cpu_accel.rewrite.capture.program_layer import ProgramLayer
from tests.rewrite.capture.decoders import DECODERS, LAYERS, build, given
from tests.rewrite.capture.models import Stack, Written

IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
NAMES = pytest.mark.parametrize("name", DECODERS)


def pair(model: Any, dtype: str = "float32") -> tuple[Any, Any]:
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype=dtype)
    return model, eager


def recorded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ProgramLayer)]


def programs(model: nn.Module) -> list[Any]:
    return [program for layer in recorded(model) for program in layer._programs.values()]


@NAMES
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_are_those_of_eager(name: str, settings: dict[str, Any]) -> None:
    model, eager = pair(build(name))
    wanted = {"max_new_tokens": 24, "do_sample": False, **settings, **given(name, 2)}
    for mask in (torch.ones_like(IDS), MASK):
        ours, theirs = (tried.generate(IDS, attention_mask=mask, **wanted) for tried in (model, eager))
        assert torch.equal(ours, theirs)
    assert len(recorded(model)) == explain(model).counts()["recorded layer"] == LAYERS
    # Prompts and steps are two forms at least, and none was refused or found wrong.
    assert len(programs(model)) >= 2 * LAYERS
    assert not any(program is None or program.is_pinned or program.unfit for program in programs(model))


@NAMES
@torch.no_grad()
def test_caches_go_both_ways(name: str) -> None:
    model, eager = pair(build(name))
    before = eager(IDS, **given(name, 2)).logits
    for _ in range(2):  # the first is recorded
        for first, then in ((model, eager), (eager, model)):
            cache: Any = DynamicCache(config=eager.config)
            if name == "blip":
                cache = EncoderDecoderCache(cache, DynamicCache(config=eager.config))
            first(IDS[:, :6], **{CACHE: cache}, **given(name, 2))
            then(IDS[:, 6:9], **{CACHE: cache}, **given(name, 2))
            first(IDS[:, 9:10], **{CACHE: cache}, **given(name, 2))
            last = then(IDS[:, 10:], **{CACHE: cache}, **given(name, 2)).logits[:, -1]
            assert cache.get_seq_length() == IDS.shape[1]
            assert row_error(last, before[:, -1]) <= 1e-3
    restore(model)
    assert torch.equal(model(IDS, **given(name, 2)).logits, before)


@pytest.mark.parametrize("name", ["doge", "blip"])  # the others choose experts
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@torch.no_grad()
def test_other_dtypes(name: str, dtype: str) -> None:
    """Against their own forwards over the same packed weights, which a hook inside asks for."""
    model = build(name)
    for tried in (model, copy.deepcopy(model).bfloat16()):
        batch = {key: value.to(tried.dtype) for key, value in given(name, 2).items()}
        accelerate_for_cpu(tried, dtype=dtype)
        for _ in range(2):
            ours = tried(IDS, **batch).logits
        # BLIP's own forward rounds scores to bfloat16, which moves numbers over the steps of quantized ones.
        assert any(programs(tried)) or (name == "blip" and tried.dtype is torch.bfloat16)
        for layer in recorded(tried):
            next(iter(layer.children())).register_forward_hook(lambda *_: None)
        own = tried(IDS, **batch).logits
        assert (ours - own).norm() / own.norm() <= 0.06


class Cached(Written):
    """`Written`, with keys and values in a cache."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(self._attend)
        self.layer_idx = layer_idx
        self._cache: Any = None

    def forward(self, states: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        normed = self.norms[2](self.norms[0](states))
        heads = (
            part(normed).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key, value = heads
        if cache is not None:
            key, value = self.stored(cache, key, value)
        scores = query @ key.transpose(-1, -2) / 4.0
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        states = states + self.output(attended)
        return states + self.down(nn.functional.gelu(self.up(self.norms[1](states))))

    def stored(self, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = cache.update(key, value, self.layer_idx)
        return stored

    def _attend(self, *_: Any) -> Tensor:
        raise NotImplementedError


class HandingOn(Cached):
    def forward(self, states: Tensor, cache: Any = None) -> Any:  # type: ignore[override]
        return super().forward(states, cache), {"cache": [cache]}


class Deciding(Cached):
    def forward(self, states: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        output = super().forward(states, cache)
        return -output if output[0, 0, 0] > 0 else output


class Asking(Cached):
    """Reads the stored keys and values of the layer before it."""

    def stored(self, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().stored(cache, key, value)
        return key + cache.layers[0].keys.mean(), value


class Counting(Cached):
    def stored(self, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().stored(cache, key, value)
        return key * (1 + len(cache.is_sliding)), value


def stacked(kind: type[Cached]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return pair(Stack(kind(0), kind(1)).eval())


def run(model: nn.Module, cache: Any, steps: int) -> list[Tensor]:
    """A prompt and tokens behind it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return [model(torch.randn(2, 1 if n else 7, 64, generator=generator), cache) for n in range(steps)]


def error(model: Any, eager: Any, steps: int = 12) -> float:
    caches = [DynamicCache(), DynamicCache()]
    pairs = zip(run(model, caches[0], steps), run(eager, caches[1], steps), strict=True)
    errors = [row_error(ours, theirs) for ours, theirs in pairs]
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        errors += [row_error(ours.keys, theirs.keys), row_error(ours.values, theirs.values)]
    return max(errors)


def test_a_cache_that_is_handed_on_is_the_one_that_was_given() -> None:
    """As LED's layers do."""

    class Chain(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, states: Tensor, cache: Any = None) -> Tensor:
            for layer in self.layers:
                states, told = layer(states, cache)
                assert told["cache"][0] is cache
            return states

    torch.manual_seed(0)
    model, eager = pair(Chain(HandingOn(0), HandingOn(1)).eval())
    assert error(model, eager) <= 1e-4
    assert len(programs(model)) == 4  # a prompt's and a token's in each layer


def test_a_branch_behind_the_cache_leaves_it_as_it_was() -> None:
    model, eager = stacked(Deciding)
    for _ in range(3):
        assert error(model, eager) <= 1e-4
    assert any(program.unfit for program in programs(model))  # some steps went both ways


@pytest.mark.parametrize(("kind", "reason"), [(Asking, "another layer's"), (Counting, "is_sliding")])
def test_what_is_asked_of_a_cache_besides_is_refused(kind: type[Cached], reason: str) -> None:
    model, eager = stacked(kind)
    for _ in range(2):
        assert error(model, eager) <= 1e-4
    told = [item.reason for item in explain(model).left if item.structure == "recorded layer"]
    assert told
    assert all(reason in str(said) for said in told)


def test_caches_of_other_kinds_go_to_its_own_forward() -> None:
    model = build("doge")
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    caches = [StaticCache(config=eager.config, max_cache_len=32) for _ in range(2)]
    with torch.no_grad():
        ours, theirs = (
            tried(IDS, **{CACHE: cache}).logits for tried, cache in zip((model, eager), caches, strict=True)
        )
    assert row_error(ours, theirs) <= 1e-3
    reasons = {item.reason for item in explain(model).left if item.structure == "recorded layer"}
    assert reasons == {"layers that use StaticCache are not recorded"}


def test_a_wrong_call_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its first comparison finds wrong has written to the cache by then."""
    model, eager = stacked(Cached)
    run(model, DynamicCache(), 1)
    steps = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, inputs: steps(self, inputs) + 1)
    with pytest.warns(RuntimeWarning, match="off by"):
        assert error(model, eager, steps=1) <= 1e-4
    assert not recorded(model)


def test_what_is_compared_leaves_our_own_storage_as_the_forward_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caches of `generate` are written in place, and a copy has the same storage."""
    model, eager = stacked(Cached)
    for length in (7, 9):
        monkeypatch.setattr(Program, "__call__", _writing_badly)
        caches = [CPUCache(LlamaConfig(num_hidden_layers=2)) for _ in range(2)]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for tokens in (length, 1):
                states = torch.randn(2, tokens, 64, generator=generator)
                ours, theirs = (
                    tried(states, cache) for tried, cache in zip((model, eager), caches, strict=True)
                )
                assert row_error(ours, theirs) <= 1e-4
        for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            assert row_error(ours.keys, theirs.keys) <= 1e-4
        monkeypatch.undo()
    assert not any(programs(model))


def _writing_badly(self: Program, inputs: Any, steps: Any = Program.__call__) -> Any:
    caches = [value for value in inputs if isinstance(value, CPUCache)]
    before = [[layer.length for layer in cache.layers] for cache in caches]
    output = steps(self, inputs)
    for cache, lengths in zip(caches, before, strict=True):
        for layer, length in zip(cache.layers, lengths, strict=True):
            if layer.length > length:
                layer.key_storage[:, :, length : layer.length] += 1
    return output


def test_attention_weights_of_keys_that_are_stored() -> None:
    """RoFormer returns them in any case; to be compared they are made before the forward writes to the same storage."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = RoFormerConfig(vocab_size=60, is_decoder=True, use_cache=True, **sizes)
    model, eager = pair(RoFormerForCausalLM(config).eval())
    wanted = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **wanted), eager.generate(IDS, **wanted))
    assert any(programs(model))
