"""The first real call of each fused part is compared with its own forward; only faulty parts are unfused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.rewrite.core.first_call_cases import IDS, MODELS, output, pending_checks
from tests.rewrite.decoder.decoder_families import DECODERS, padded
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.encoder_families import bert


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_right_parts_pass_once_and_nothing_is_left_behind(name: str, dtype: str) -> None:
    build, call = MODELS[name]
    model = accelerate_for_cpu(build(), dtype=dtype)
    assert pending_checks(model) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        first = output(model, call)
    assert pending_checks(model) == 0
    assert torch.equal(output(model, call), first)
    assert not any("first call" in (item.reason or "") for item in explain(model).items)


@pytest.mark.parametrize("verify", [True, False])
def test_other_settings_compare_nothing_at_the_first_call(verify: bool) -> None:
    assert pending_checks(accelerate_for_cpu(bert(), dtype="float32", verify=verify)) == 0


@torch.no_grad()
def test_a_cache_holds_what_it_holds_without_the_check() -> None:
    model = DECODERS["llama"].build()
    caches = []
    for verify in ("first", True):
        accelerate_for_cpu(model, dtype="float32", verify=verify)
        batch = padded()["left"]
        got = model.generate(**batch, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        caches.append((got.sequences, got.past_key_values.get_seq_length()))
        restore(model)
    assert torch.equal(caches[0][0], caches[1][0])
    assert caches[0][1] == caches[1][1]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
def test_decoders_with_an_encoder(family: str) -> None:
    built = FAMILIES[family]
    model = built.build()
    expected = model.generate(**built.inputs(padded=True), max_new_tokens=5)
    accelerate_for_cpu(model, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert torch.equal(model.generate(**built.inputs(padded=True), max_new_tokens=5), expected)
    assert pending_checks(model) == 0


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_checks_of_their_own(clone: Callable[[nn.Module], nn.Module]) -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    twin = clone(model)
    checks = pending_checks(model)
    first = output(twin, IDS)
    assert (pending_checks(model), pending_checks(twin)) == (checks, 0)
    assert torch.equal(output(model, IDS), first)
    assert pending_checks(model) == 0


def test_a_model_that_is_restored_before_its_first_call() -> None:
    model = bert()
    expected = output(model, IDS)
    restore(accelerate_for_cpu(model, dtype="float32"))
    assert pending_checks(model) == 0
    assert torch.equal(output(model, IDS), expected)


def test_a_call_that_is_not_fused_does_not_count() -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    layer = model.encoder.layer[0]
    handle = layer.attention.self.query.register_forward_hook(lambda *_: None)
    output(model, IDS)
    handle.remove()
    assert pending_checks(model) > 0
    output(model, IDS)
    assert pending_checks(model) == 0


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
def test_a_cache_that_was_asked_for_is_no_fault(name: str, kv_cache: str) -> None:
    model = accelerate_for_cpu(DECODERS[name].build(), dtype="float32", kv_cache=kv_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.generate(**padded()["left"], max_new_tokens=3, do_sample=False)
