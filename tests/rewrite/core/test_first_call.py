"""The first real call of each fused part is compared with its own forward; planted faults are found, and left alone at that."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinModel

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.patching.fused_module import FusedModuleMixin
from hf_cpu_accel.rewrite.core.first_call import FirstCall
from hf_cpu_accel.rewrite.core.verify import row_error
from hf_cpu_accel.rewrite.encoder import window_layer
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer
from tests.rewrite.decoder.decoder_families import DECODERS, padded
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES
from tests.rewrite.encoder_families import bert, dinov2, modernbert, t5, vit

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (bert, IDS),
    "t5 encoder": (t5, IDS),
    "modernbert": (modernbert, IDS),
    "vit": (vit, PIXELS),
    "dinov2": (lambda: dinov2(0.5), PIXELS),
    **{name: (DECODERS[name].build, IDS) for name in ("llama", "gpt2", "phi", "mixtral", "gemma2")},
}


def output(model: nn.Module, call: Any, *, with_cache: bool = False, **more: Any) -> Tensor:
    if with_cache:
        more["past_key_values"] = CPUCache(model.config)
    elif hasattr(model, "lm_head"):
        more["use_cache"] = False
    with torch.no_grad():
        return next(v for v in model(call, **more).values() if isinstance(v, Tensor)) + 0


def pending_checks(model: nn.Module) -> int:
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum(isinstance(getattr(hook, "__self__", None), FirstCall) for hook in hooks)


def parts_of(model: nn.Module) -> Iterator[tuple[str, FusedModuleMixin]]:
    for path, module in model.named_modules():
        if isinstance(module, FusedModuleMixin):
            yield path, module


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


def check_fault(
    model: nn.Module, part: FusedModuleMixin, path: str, call: Any, expected: Tensor, **more: Any
) -> None:
    """The fault is found at the first call, which is right already, as is the second; restore brings all back."""
    original = part._original_class
    with pytest.warns(RuntimeWarning, match=rf"{path}, fused by hf_cpu_accel: on its first call it was"):
        got = output(model, call, **more)
    assert row_error(got, expected) <= 1e-3
    assert row_error(output(model, call, **more), expected) <= 1e-3
    assert type(part) is original
    (row,) = [item for item in explain(model).items if "first call" in (item.reason or "")]
    assert row.name == path
    restore(model)
    assert torch.equal(output(model, call), expected)


ENCODER_FAULTS: dict[str, Callable[[FusedEncoderLayer], dict[str, Any]]] = {
    "scale": lambda layer: {"scale": layer._parts.scale * 0.5},
    "activation": lambda layer: {"activation": "relu" if layer._parts.activation != "relu" else "silu"},
    "norms swapped": lambda layer: {
        "attention_norm": layer._parts.ffn_norm,
        "ffn_norm": layer._parts.attention_norm or layer._parts.ffn_norm,
    },
    "query for value": lambda layer: {
        "attention": dataclasses.replace(
            layer._parts.attention, query=layer._parts.attention.value, value=layer._parts.attention.query
        )
    },
    "key for value": lambda layer: {
        "attention": dataclasses.replace(
            layer._parts.attention, key=layer._parts.attention.value, value=layer._parts.attention.key
        )
    },
}


@pytest.mark.parametrize("name", ["bert", "vit", "dinov2", "modernbert"])
@pytest.mark.parametrize("fault", ENCODER_FAULTS)
def test_faults_of_encoder_layers(name: str, fault: str) -> None:
    build, call = MODELS[name]
    model = build()
    for parameter in (
        model.parameters()
    ):  # so that one norm is not another's, and attention looks at some keys more than at others
        if parameter.dim() == 1:
            parameter.data += torch.rand(parameter.shape) - 0.5
        elif parameter.dim() == 2:
            parameter.data *= 4
    expected = output(model, call)
    accelerate_for_cpu(model, dtype="float32")
    path, part = [(p, m) for p, m in parts_of(model) if isinstance(m, FusedEncoderLayer)][-1]
    part._parts = dataclasses.replace(part._parts, **ENCODER_FAULTS[fault](part))
    check_fault(model, part, path, call, expected)


ARGUMENT_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda bias: torch.full_like(bias, float("nan")),
    "wrong": lambda bias: bias + 0.5,
    "dropped": torch.zeros_like,
    "reversed": lambda bias: bias.flip(0),
}


@pytest.mark.parametrize("name", ["bert", "vit"])
@pytest.mark.parametrize("fault", ARGUMENT_FAULTS)
def test_faults_of_biases(name: str, fault: str) -> None:
    build, call = MODELS[name]
    model = build()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    expected = output(model, call)
    accelerate_for_cpu(model, dtype="float32")
    path, part = [(p, m) for p, m in parts_of(model) if isinstance(m, FusedEncoderLayer)][-1]
    arguments = part._bind()
    place = next(
        i
        for i, a in enumerate(arguments)
        if isinstance(a, Tensor) and a.dim() == 1 and a.dtype is torch.float32 and i > 1
    )
    part._bound = (*arguments[:place], ARGUMENT_FAULTS[fault](arguments[place]), *arguments[place + 1 :])
    check_fault(model, part, path, call, expected)


def test_a_dropped_window() -> None:
    model = modernbert()
    ids = torch.randint(3, 90, (2, 24))
    expected = output(model, ids)
    accelerate_for_cpu(model, dtype="float32")
    parts = [(path, part) for path, part in parts_of(model) if isinstance(part, FusedEncoderLayer)]
    original = FusedEncoderLayer._inputs

    def blind(self: FusedEncoderLayer, *given: Any) -> Any:
        inputs = original(self, *given)
        if inputs is None or not any(self is part for _, part in parts):
            return inputs
        padding, mask, relative, cos, sin, _, bias = inputs
        return padding, mask, relative, cos, sin, 0, bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedEncoderLayer, "_inputs", blind)
        with pytest.warns(RuntimeWarning, match="fused by hf_cpu_accel"):
            assert row_error(output(model, ids), expected) <= 1e-3
    assert any("first call" in (item.reason or "") for item in explain(model).items)


def test_a_stale_mask() -> None:
    model = bert()
    mask = torch.ones_like(IDS)
    mask[0, 5:] = 0
    expected = output(model, IDS, attention_mask=mask)
    accelerate_for_cpu(model, dtype="float32")
    original = FusedEncoderLayer._inputs

    def stale(self: FusedEncoderLayer, *given: Any) -> Any:
        inputs = original(self, *given)
        return None if inputs is None else (torch.ones(2, 9, dtype=torch.bool), *inputs[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedEncoderLayer, "_inputs", stale)
        with pytest.warns(RuntimeWarning, match="fused by hf_cpu_accel"):
            got = output(model, IDS, attention_mask=mask)
    assert row_error(got[0, :5], expected[0, :5]) <= 1e-3
    assert row_error(got[1], expected[1]) <= 1e-3


DECODER_FAULTS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda parts: dataclasses.replace(parts, scale=parts.scale * 0.5),
    "window": lambda parts: dataclasses.replace(parts, window=2),
    "rotation": lambda parts: dataclasses.replace(parts, rotary_interleaved=not parts.rotary_interleaved),
    "heads of keys": lambda parts: dataclasses.replace(parts, key=parts.value, value=parts.key),
    "residual": lambda parts: dataclasses.replace(parts, residual_scale=0.5),
    "softcap": lambda parts: dataclasses.replace(parts, softcap=0.5),
    "no norm": lambda parts: dataclasses.replace(parts, attention_norm=None),
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi"])
@pytest.mark.parametrize("fault", DECODER_FAULTS)
@pytest.mark.parametrize("with_cache", [False, True])
def test_faults_of_decoder_layers(name: str, fault: str, with_cache: bool) -> None:
    if name == "gemma2" and fault == "window":
        name = "stablelm"  # a mask for another window than that of the layer is not taken at all
    model = DECODERS[name].build()
    expected = output(model, IDS)
    accelerate_for_cpu(model, dtype="float32")
    path, part = [(p, m) for p, m in parts_of(model) if hasattr(m, "role")][-1]
    part.role = dataclasses.replace(part.role, parts=DECODER_FAULTS[fault](part.role.parts))
    part.forget()
    check_fault(model, part, path, IDS, expected, with_cache=with_cache)


def test_a_fault_of_a_layer_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are learnt from one image; a fault that only a batch shows is found when the batch is computed."""
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[2], num_heads=[2], window_size=4)
    model = SwinModel(config, add_pooling_layer=False).eval()
    expected = output(model, PIXELS)
    accelerate_for_cpu(model, dtype="float32")
    compute = window_layer.compute
    monkeypatch.setattr(window_layer, "compute", lambda x, *rest: compute(x, *rest) + (len(x) > 1))
    output(model, PIXELS)
    with pytest.warns(
        RuntimeWarning, match=r"blocks\.0, fused by hf_cpu_accel: on its first call it was off by"
    ):
        assert row_error(output(model, PIXELS), expected) <= 1e-3
    assert row_error(output(model, PIXELS), expected) <= 1e-3
    assert any("first call" in (item.reason or "") for item in explain(model).items)


@torch.no_grad()
@pytest.mark.parametrize("kv_cache", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
def test_a_cache_that_was_asked_for_is_no_fault(name: str, kv_cache: str) -> None:
    model = accelerate_for_cpu(DECODERS[name].build(), dtype="float32", kv_cache=kv_cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model.generate(**padded()["left"], max_new_tokens=3, do_sample=False)
