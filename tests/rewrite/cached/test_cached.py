"""Layers around attention with a cache are fused, generate the tokens of eager, share caches with it, and can be restored."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.rewrite.cached.attention import CachedAttention
from tests.rewrite.cached.cached_models import LAYERS, MODELS, build, mimi, reading_both_ways, spread

IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
GREEDY = {"max_new_tokens": 48, "do_sample": False}
STEMS = pytest.mark.parametrize("stem", list(MODELS))


def pair(model: Any) -> tuple[Any, Any]:
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    return model, eager


def fused(model: Any, structure: str) -> int:
    return sum(item.structure == structure and item.reason is None for item in explain(model).items)


@STEMS
def test_greedy_tokens_are_those_of_eager(stem: str) -> None:
    model, eager = pair(build(stem))
    assert fused(model, "cached attention") == fused(model, "cached layer") == LAYERS
    for mask in (None, MASK):
        given = {} if mask is None else {"attention_mask": mask}
        assert torch.equal(model.generate(IDS, **given, **GREEDY), eager.generate(IDS, **given, **GREEDY))


@STEMS
@torch.no_grad()
def test_caches_and_restore(stem: str) -> None:
    model, eager = pair(build(stem))
    assert fused(model, "cached layer") == LAYERS
    before = eager(IDS).logits
    assert row_error(model(IDS, use_cache=False).logits, before) <= 1e-3
    assert row_error(pickle.loads(pickle.dumps(model))(IDS).logits, before) <= 1e-3
    for first, then in ((model, eager), (eager, model)):
        cache = DynamicCache(config=eager.config)
        first(IDS[:, :6], **{CACHE: cache})
        then(IDS[:, 6:9], **{CACHE: cache})
        first(IDS[:, 9:10], **{CACHE: cache})
        assert row_error(then(IDS[:, 10:], **{CACHE: cache}).logits[:, -1], before[:, -1]) <= 1e-3
    restore(model)
    assert torch.equal(model(IDS).logits, before)
    assert not any(isinstance(module, CachedAttention) for module in model.modules())


@pytest.mark.parametrize(
    "stem", [stem for stem in MODELS if stem != "Phimoe"]
)  # whose tokens go to other experts
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@torch.no_grad()
def test_other_dtypes(stem: str, dtype: str) -> None:
    """Against their own forwards over the same packed weights, which a hook inside asks for."""
    model = build(stem)
    for tried in (model, copy.deepcopy(model).bfloat16()):
        accelerate_for_cpu(tried, dtype=dtype)
        assert fused(tried, "cached layer") == LAYERS
        ours = tried(IDS).logits
        for layer in tried.model.layers:
            layer.self_attn.q_proj.register_forward_hook(lambda *_: None)
        own = tried(IDS).logits
        assert (ours - own).norm() / own.norm() <= 0.06


@torch.no_grad()
def test_layers_of_a_codec() -> None:
    model, eager = pair(mimi())
    assert fused(model, "cached layer") == 2 * LAYERS
    sound = torch.randn(2, 1, 640, generator=torch.Generator().manual_seed(1))
    states = [tried.encoder(sound)[0] for tried in (model, eager)]
    assert row_error(*states) <= 1e-3


@pytest.mark.filterwarnings(
    "error::RuntimeWarning"
)  # its first call compares each layer with its own forward
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_the_nearest_activation_is_chosen(dtype: str) -> None:
    model = reading_both_ways()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype=dtype)
    assert fused(model, "cached layer") == LAYERS
    assert [layer._parts.ffn[0].activation for layer in model.layers] == ["gelu_tanh"] * LAYERS
    real = MASK.bool()
    states = [tried(IDS, attention_mask=MASK)[0][real] for tried in (model, eager)]
    assert row_error(*states) <= {"float32": 1e-4, "bfloat16": 3e-2, "int8": 0.1}[dtype]
    assert fused(model, "cached layer") == LAYERS


def test_beams() -> None:
    model, eager = pair(build("Apertus"))
    settings = {"max_new_tokens": 16, "num_beams": 3, "do_sample": False, "attention_mask": MASK}
    assert torch.equal(model.generate(IDS, **settings), eager.generate(IDS, **settings))


class _Choosing(LlamaAttention):
    """Attention with weights of its own that decide nothing in short texts."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.indexer = torch.nn.Linear(config.hidden_size, 4)


class _Tanh(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return output.tanh(), weights


@pytest.mark.parametrize("kind", [_Choosing, _Tanh])
def test_other_attention_of_the_same_names_is_left(kind: Any) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = spread(LlamaForCausalLM(config).eval())
    for index, layer in enumerate(model.model.layers):
        layer.self_attn = kind(config, index).eval()
    accelerate_for_cpu(model, dtype="float32")
    assert fused(model, "cached attention") == fused(model, "decoder layer") == 0
