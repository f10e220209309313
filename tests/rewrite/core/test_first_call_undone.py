"""A first call whose check fails leaves no traces: outputs and caches equal those of the own forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache, CPUCrossCache
from hf_cpu_accel.rewrite.core.cache_state import put_back, snapshot
from hf_cpu_accel.rewrite.core.first_call import FirstCall
from tests.rewrite.capture import decoders as recorded
from tests.rewrite.decoder.decoder_families import DECODERS
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.recurrent import hybrids

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
CLOSE = 1e-3


@dataclass(frozen=True)
class Case:
    """A model and how it is called.

    Attributes:
        caches: what callers pass, by name; each takes the model's config.
        inputs: of a prompt.
        ids: the name of the argument that has the tokens.
    """

    build: Callable[[], Any]
    caches: dict[str, Callable[[Any], Any]]
    inputs: Callable[[], dict[str, Any]]
    ids: str = "input_ids"


def _prompt() -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK}


def _of_encoder(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: {**FAMILIES[name].inputs(padded=True), "decoder_input_ids": IDS[:, :5]}


_NONE: dict[str, Callable[[Any], Any]] = {"none": lambda config: None}
_KEYS = _NONE | {
    "dynamic": lambda config: DynamicCache(config=config),
    "without config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=32),
    "ours": CPUCache,
}
_STATES = _NONE | {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=32),
}
_TWO = _NONE | {
    "dynamic": lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "ours": lambda config: EncoderDecoderCache(CPUCache(config), CPUCrossCache(config)),
}
_PLAIN = _NONE | {"dynamic": lambda config: DynamicCache(config=config)}

CASES = {
    **{name: Case(DECODERS[name].build, _KEYS, _prompt) for name in ("gpt2", "llama", "gemma2", "mixtral")},
    **{
        name: Case(FAMILIES[name].build, _TWO, _of_encoder(name), "decoder_input_ids")
        for name in ("t5", "bart", "whisper")
    },
    **{
        name: Case(lambda name=name: hybrids.build(name), _STATES, _prompt)
        for name in ("Mamba", "Mamba2", "Lfm2", "Qwen3_5", "Jamba")
    },
    "FalconH1": Case(lambda: hybrids.build("FalconH1"), _PLAIN, _prompt),
    **{
        f"recorded {name}": Case(
            lambda name=name: recorded.build(name),
            _PLAIN,
            lambda name=name: {"input_ids": IDS, **recorded.given(name, 2)},
        )
        for name in ("doge", "deepseek-v3.2", "zaya", "falcon-h1", "gemma-3n", "blip")
    },
}
CALLS = [(name, cache) for name, case in CASES.items() for cache in case.caches]


@pytest.fixture
def failing_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make each check of a first call fail; the returned list fills with the paths of the parts."""
    failed: list[str] = []

    def fail(self: FirstCall, *_: Any) -> str:
        failed.append(self.path)
        return "off by design"

    monkeypatch.setattr(FirstCall, "_difference", fail)
    return failed


@torch.no_grad()
@pytest.mark.parametrize(("name", "cache"), CALLS)
def test_every_call_is_as_if_nothing_had_been_checked(
    name: str, cache: str, failing_checks: list[str]
) -> None:
    case = CASES[name]
    eager = case.build()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number in range(3):  # of a recorded layer the second call is checked
            expected, ours = (_text(m, case, cache) for m in (eager, model))
            for step, (theirs, got) in enumerate(zip(expected, ours, strict=True)):
                assert row_error(got.logits, theirs.logits) <= CLOSE, f"call {number}, step {step}"
            _check_caches(ours[-1], expected[-1])
    assert failing_checks


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bart", "FalconH1", "Mamba"])
def test_text_is_generated_as_by_the_own_forward(name: str, failing_checks: list[str]) -> None:
    case = CASES[name]
    eager = case.build()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    with pytest.warns(RuntimeWarning, match="off by design"):
        expected, got = (
            m.generate(**case.inputs(), max_new_tokens=5, do_sample=False) for m in (eager, model)
        )
    assert torch.equal(got, expected)
    assert failing_checks


@torch.no_grad()
def test_a_cross_cache_that_was_filled_before(failing_checks: list[str]) -> None:
    """By eager code: its keys stay, and are not computed again."""
    case = CASES["bart"]
    eager = case.build()
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    filled = eager(**case.inputs()).past_key_values.cross_attention_cache
    caches = [EncoderDecoderCache(DynamicCache(), copy.deepcopy(filled)) for _ in range(2)]
    for given in caches:
        given.is_updated = dict.fromkeys(range(len(filled.layers)), True)
    with pytest.warns(RuntimeWarning, match="off by design"):
        theirs, got = (
            m(**case.inputs(), past_key_values=given) for m, given in zip((eager, model), caches, strict=True)
        )
    assert row_error(got.logits, theirs.logits) <= CLOSE
    _check_caches(got, theirs)
    assert failing_checks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_state_of_tensors_is_put_back_where_they_lie(mode: Any) -> None:
    """Other holders of a cache tensor still see the contents of the cache, also for inference tensors."""
    with mode():
        cache = StaticCache(config=DECODERS["llama"].build().config, max_cache_len=4)
        heads = torch.ones(1, 2, 1, 16)
        cache.update(heads, heads, 0)
        before = cache.layers[0].keys
        states = snapshot(cache, 0, by_kernels=True)
        cache.update(2 * heads, 2 * heads, 0)
    put_back(states)
    assert cache.layers[0].keys is before
    assert before[0, 0, :, 0].tolist() == [1, 0, 0, 0]
    assert int(cache.get_seq_length()) == 1


def _text(model: Any, case: Case, cache: str) -> list[Any]:
    """A prompt and two tokens after it."""
    given = case.caches[cache](model.config)
    inputs = case.inputs()
    if given is not None:
        inputs[_cache_name(model)] = given
    outputs = [model(**inputs, use_cache=True)]
    for token in range(2):
        kept = _cache_of(outputs[-1])
        inputs[_cache_name(model)] = kept
        inputs[case.ids] = IDS[:, token : token + 1]
        if case.ids == "input_ids" and "attention_mask" in inputs:
            inputs["attention_mask"] = torch.cat([inputs["attention_mask"], MASK[:, -1:]], dim=1)
        outputs.append(model(**inputs, use_cache=True))
    return outputs


def _cache_name(model: Any) -> str:
    names = model.forward.__code__.co_varnames
    return "cache_params" if "cache_params" in names else "past_key_values"


def _cache_of(output: Any) -> Any:
    return output.get("cache_params", output.get("past_key_values"))


def _check_caches(ours: Any, theirs: Any) -> None:
    """They hold the same numbers, of the same number of tokens."""
    pairs = [(_cache_of(ours), _cache_of(theirs))]
    if hasattr(pairs[0][0], "cross_attention_cache"):
        (one, other) = pairs.pop()
        assert one.is_updated == other.is_updated
        pairs = [
            (getattr(one, name), getattr(other, name))
            for name in ("self_attention_cache", "cross_attention_cache")
        ]
    for one, other in pairs:
        assert len(one.layers) == len(other.layers)
        for ours_layer, theirs_layer in zip(one.layers, other.layers, strict=True):
            for name in ("keys", "values", "conv_states", "recurrent_states", "indexer_keys"):
                for got, expected in zip(
                    _tensors(ours_layer, name), _tensors(theirs_layer, name), strict=True
                ):
                    # ours keeps more of a window than its mask shows
                    got = got[..., -expected.shape[-2] :, :] if name in ("keys", "values") else got
                    assert row_error(got, expected) <= CLOSE, name


def _tensors(layer: Any, name: str) -> list[Tensor]:
    value = getattr(layer, name, None)
    values = value.values() if isinstance(value, dict) else [value]
    return [value for value in values if isinstance(value, Tensor) and value.numel()]
