"""Latent attention and its layers are fused, generate the tokens of eager, share caches with it, and can be restored."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.latent import attention
from hf_cpu_accel.rewrite.latent.attention import LatentAttention
from hf_cpu_accel.rewrite.latent.parts import LatentSizes
from tests.rewrite.latent.latent_models import ALL_EXPERTS, LAYERS, MODELS, build

IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
GREEDY = {"max_new_tokens": 64, "do_sample": False}
STEMS = pytest.mark.parametrize("stem", list(MODELS))


def pair(stem: str) -> tuple[Any, Any]:
    model = build(stem)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    return model, eager


def fused(model: Any, structure: str) -> int:
    return sum(item.structure == structure and item.reason is None for item in explain(model).items)


@STEMS
def test_greedy_tokens_are_those_of_eager(stem: str) -> None:
    model, eager = pair(stem)
    assert fused(model, "latent attention") == fused(model, "latent layer") == LAYERS
    for mask in (None, MASK):
        given = {} if mask is None else {"attention_mask": mask}
        assert torch.equal(model.generate(IDS, **given, **GREEDY), eager.generate(IDS, **given, **GREEDY))


@STEMS
@torch.no_grad()
def test_without_a_cache_and_after_restore(stem: str) -> None:
    model, eager = pair(stem)
    before = eager(IDS).logits
    assert row_error(model(IDS, use_cache=False).logits, before) <= 1e-3
    padded = model(IDS, attention_mask=MASK).logits, eager(IDS, attention_mask=MASK).logits
    assert row_error(padded[0][MASK.bool()], padded[1][MASK.bool()]) <= 1e-3
    assert row_error(pickle.loads(pickle.dumps(model))(IDS).logits, before) <= 1e-3
    restore(model)
    assert torch.equal(model(IDS).logits, before)
    assert not any(isinstance(module, LatentAttention) for module in model.modules())


@STEMS
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@torch.no_grad()
def test_other_dtypes(stem: str, dtype: str) -> None:
    model = build(stem, **(ALL_EXPERTS if "n_routed_experts" in MODELS[stem] else {}))
    for tried in (model, copy.deepcopy(model).bfloat16()):
        accelerate_for_cpu(tried, dtype=dtype)
        assert fused(tried, "latent layer") == LAYERS
        ours = steps(tried)
        for layer in tried.model.layers:  # from now on their own forwards, over the same packed weights
            layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
        own = steps(tried)
        # Their products round latents to 8 bits, ours do not.
        assert (ours - own).norm() / own.norm() <= 0.06


def steps(model: Any) -> torch.Tensor:
    """The logits of the last tokens, one by one behind a prompt."""
    cache = DynamicCache(config=model.config)
    model(IDS[:, :8], **{CACHE: cache})
    return torch.stack([model(IDS[:, at : at + 1], **{CACHE: cache}).logits[:, -1] for at in (8, 9, 10)])


@pytest.mark.parametrize("stem", ["DeepseekV2", "DeepseekV3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_stock_code_goes_on_from_us_and_we_from_stock_code(stem: str, kind: str) -> None:
    model, eager = pair(stem)
    expected = eager(IDS).logits[:, -1]
    for first, then in ((model, eager), (eager, model)):
        made: Any = (
            DynamicCache(config=eager.config)
            if kind == "dynamic"
            else StaticCache(eager.config, max_cache_len=16)
        )
        first(IDS[:, :6], **{CACHE: made})
        then(IDS[:, 6:9], **{CACHE: made})
        first(IDS[:, 9:10], **{CACHE: made})
        assert row_error(then(IDS[:, 10:], **{CACHE: made}).logits[:, -1], expected) <= 1e-3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
@torch.no_grad()
def test_caches_of_ours(dtype: torch.dtype | None) -> None:
    model, eager = pair("DeepseekV3")
    cache = CPUCache(model.config, dtype)
    model(IDS[:, :5], **{CACHE: cache})
    model(IDS[:, 5:8], **{CACHE: cache})
    model(IDS[:, 8:], **{CACHE: cache})
    cache.crop(-2)
    outputs = torch.cat([model(IDS[:, at : at + 1], **{CACHE: cache}).logits for at in (9, 10)], 1)
    allowed = {None: 1e-3, torch.bfloat16: 0.05, torch.int8: 0.1}[dtype]
    assert row_error(outputs, eager(IDS).logits[:, 9:]) <= allowed


@pytest.mark.parametrize("stem", ["DeepseekV3", "MiniCPM3"])
def test_beams(stem: str) -> None:
    model, eager = pair(stem)
    settings = {"max_new_tokens": 16, "num_beams": 3, "do_sample": False, "attention_mask": MASK}
    assert torch.equal(model.generate(IDS, **settings), eager.generate(IDS, **settings))


@torch.no_grad()
def test_steps_read_the_cache_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("DeepseekV3")
    seen: list[tuple[int, ...]] = []
    stock = attention.attention_forward

    def watched(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.shape[2], *key.shape[1:], key.data_ptr() - value.data_ptr()))
        assert not isinstance(key, LazyTensor)
        return stock(module, query, key, value, *args, **kwargs)

    monkeypatch.setattr(attention, "attention_forward", watched)
    cache = CPUCache(model.config)
    model(IDS, **{CACHE: cache})
    assert seen[0][1:4] == (4, 11, 24)  # a prompt: keys and values are made
    model(IDS[:, :1], **{CACHE: cache})
    assert seen[-1] == (1, 1, 12, 40, 0)  # a token: it attends to latents
    storage: Any = cache.layers[0]
    assert storage.value_storage.data_ptr() == storage.key_storage.data_ptr() + 32 * 4


@torch.no_grad()
def test_what_is_unknown_takes_the_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = pair("DeepseekV3")
    monkeypatch.setattr(LatentAttention, "_projected", None)  # nothing fused could run
    seen: list[int] = []
    hook = model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: seen.append(1))
    hook2 = model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: seen.append(1))
    assert row_error(model(IDS).logits, eager(IDS).logits) <= 1e-3
    assert seen == [1, 1]
    hook.remove(), hook2.remove()


def test_which_way_costs_less() -> None:
    lite = LatentSizes(heads=16, rank=512, plain=128, turned=64, value=128)
    assert lite.absorbs(1, 2)
    assert lite.absorbs(32, 4096)
    assert not lite.absorbs(512, 512)
    assert not lite.absorbs(1024, 2048)


class _Other(DeepseekV3Attention):
    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, values.abs()


def test_other_attention_of_the_same_names_is_left() -> None:
    model = build("DeepseekV3")
    for layer in model.model.layers:
        layer.self_attn.__class__ = _Other
    accelerate_for_cpu(model, dtype="float32")
    assert fused(model, "latent attention") == fused(model, "latent layer") == 0
