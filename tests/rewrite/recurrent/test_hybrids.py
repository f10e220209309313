"""Models with recurrent layers: mixers and layers are fused, generate the tokens of eager, and can be restored."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.inputs import CACHE
from hf_cpu_accel.hosts.arguments import parameters_of, with_its_cache_name
from hf_cpu_accel.packing.linear import unpack_linear
from hf_cpu_accel.rewrite.recurrent.parts import StateSpace
from hf_cpu_accel.runtime.torch_modes import AroundOps
from tests.rewrite.recurrent.hybrids import HYBRIDS, build

IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
GREEDY = {"max_new_tokens": 128, "do_sample": False}
JOINED = [
    *("Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "Qwen3Next with experts", "Lfm2", "Lfm2Moe"),
    *(
        "GraniteMoeHybrid",
        "GraniteMoeHybrid with experts",
        "Bamba",
        "Jamba",
        "Mamba",
        "Mamba2",
    ),
]
STEMS = pytest.mark.parametrize("stem", list(HYBRIDS))


def fused(model: Any, structure: str) -> list[Any]:
    return [item for item in explain(model).items if item.structure == structure and item.reason is None]


def alone(model: Any) -> dict[str, str]:
    """Why layers compute their steps by themselves."""
    items = explain(model).items
    return {item.name: str(item.reason) for item in items if item.structure == "recurrent step"}


@STEMS
def test_greedy_tokens_are_those_of_eager(stem: str) -> None:
    model = build(stem)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    _, op, mixers, layers, attending = HYBRIDS[stem]
    assert [item.op for item in fused(model, "recurrent mixer")] == [op] * mixers
    assert len(fused(model, "recurrent layer")) == layers
    assert len(fused(model, "decoder layer")) == attending
    for mask in (None, MASK):
        given = {} if mask is None else {"attention_mask": mask}
        assert torch.equal(model.generate(IDS, **given, **GREEDY), eager.generate(IDS, **given, **GREEDY))


@pytest.mark.parametrize("stem", ["NemotronH", "Zamba2", "Bamba"])
def test_prompts_of_one_token_in_any_cache(stem: str) -> None:
    """Hosts bound the time steps of a first token, and not those of one behind others."""
    model = build(stem)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    wanted = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    for cache in ("dynamic", "static"):
        ours, theirs = (m.generate(IDS[:, :1], cache_implementation=cache, **wanted) for m in (model, eager))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stem", JOINED)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_step_is_one_call(stem: str, dtype: str) -> None:
    model = build(stem)
    accelerate_for_cpu(model, dtype=dtype)
    calls: list[str] = []

    def note(op: Any, args: Any, kwargs: Any) -> Any:
        calls.append(op.name().split(".")[0].removeprefix("hf_cpu_accel::"))
        return op(*args, **kwargs)

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        given = with_its_cache_name(parameters_of(model.forward), {"cache": cache})
        model(IDS, attention_mask=MASK, **given)
        with AroundOps(note):
            model(IDS[:, :1], **given)
    ours = [name for name in calls if name in ("decoder_layers", HYBRIDS[stem][1], "gated_ffn", "rms_norm")]
    assert ours == ["decoder_layers", "rms_norm"]  # the norm behind the last layer


def test_steps_that_stay_alone_say_why() -> None:
    model = build("Qwen3Next")
    linear = model.model.layers[2].linear_attn.in_proj_qkvz
    linear.bias = nn.Parameter(torch.randn(linear.out_features))
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    reasons = alone(model)
    assert set(reasons) == {"model.layers.2"}
    assert all("would have to be reordered" in reason for reason in reasons.values())
    given = {"attention_mask": MASK, "max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(IDS, **given), eager.generate(IDS, **given))


def test_steps_of_scans_with_norms_that_have_no_weights_stay_alone() -> None:
    model = build("FalconMamba")
    accelerate_for_cpu(model, dtype="float32")
    reasons = alone(model)
    assert set(reasons) == {"backbone.layers.0", "backbone.layers.1"}
    assert all("not RMS norms with weights" in reason for reason in reasons.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@torch.no_grad()
def test_weights_that_lie_in_another_order_are_known_in_their_own(dtype: str) -> None:
    model = build("Qwen3Next")
    for name in ("in_proj_qkvz", "in_proj_ba"):
        alone = nn.Sequential(copy.deepcopy(getattr(model.model.layers[0].linear_attn, name))).eval()
        accelerate_for_cpu(alone, dtype=dtype)
        accelerate_for_cpu(model, dtype=dtype)
        linear, input = getattr(model.model.layers[0].linear_attn, name), torch.randn(3, 64)
        assert linear.group.order is not None
        assert torch.equal(linear(input), alone(input))
        assert torch.equal(linear.state_dict()["weight"], alone.state_dict()["0.weight"])
        assert torch.equal(
            unpack_linear(linear.group.in_own_order(linear.index)), unpack_linear(alone[0].packed)
        )
        restore(model)


@torch.no_grad()
def test_a_model_whose_weights_lie_in_another_order_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build("Qwen3Next")
    accelerate_for_cpu(model, dtype="int4")
    expected = model(IDS).logits
    model.save_pretrained(tmp_path, packed=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(fused(loaded, "recurrent layer")) == 2
    assert alone(loaded) == {}
    assert torch.equal(loaded(IDS).logits, expected)


@pytest.mark.parametrize("stem", JOINED)
def test_of_those_that_join_nothing_is_said(stem: str) -> None:
    model = build(stem)
    accelerate_for_cpu(model, dtype="float32")
    assert alone(model) == {}


def test_a_step_that_gives_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_eps(*given: Any) -> Any:
        recurrence = whole(*given)
        assert recurrence is not None
        return replace(recurrence, norm_eps=1e3)

    whole = StateSpace.recurrence
    monkeypatch.setattr(StateSpace, "recurrence", with_another_eps)
    model = build("GraniteMoeHybrid")
    accelerate_for_cpu(model, dtype="float32")
    reasons = list(alone(model).values())
    assert len(reasons) == 2
    assert all(reason.startswith("the joint call differs by") for reason in reasons)


@torch.no_grad()
def test_hooks_see_what_a_step_passes_from_layer_to_layer() -> None:
    model = build("GraniteMoeHybrid")
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    seen: dict[Any, list[Any]] = {model: [], eager: []}
    for one in (model, eager):
        for layer in one.model.layers:
            layer.register_forward_hook(
                lambda _m, _a, output, one=one: seen[one].append(_first(output).clone())
            )
        cache = DynamicCache(config=one.config)
        one(IDS, **{CACHE: cache})
        one(IDS[:, :1], **{CACHE: cache})
    for ours, theirs in zip(seen[model], seen[eager], strict=True):
        assert row_error(ours, theirs) <= 1e-3


def _first(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


@pytest.mark.parametrize("stem", JOINED)
@torch.no_grad()
def test_copies_and_pickles_decode_alike(stem: str) -> None:
    model = build(stem)
    accelerate_for_cpu(model, dtype="float32")
    expected = model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(
            made.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False), expected
        )


@STEMS
@torch.no_grad()
def test_restore_gives_back_the_model(stem: str) -> None:
    model = build(stem)
    before, kinds = model(IDS).logits, [type(module) for module in model.modules()]
    other = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    assert [type(module) for module in other.modules()] == kinds
    assert (
        row_error(model(IDS, attention_mask=MASK).logits[1], other(IDS, attention_mask=MASK).logits[1])
        <= 1e-3
    )
    restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(IDS).logits, before)


@STEMS
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@torch.no_grad()
def test_other_dtypes(stem: str, dtype: str) -> None:
    model = build(stem)
    expected = model(IDS).logits
    accelerate_for_cpu(model, dtype=dtype)
    assert len(fused(model, "recurrent mixer")) == HYBRIDS[stem][2]
    error = (model(IDS).logits - expected).norm() / expected.norm()
    assert error <= {"bfloat16": 0.05, "int8": 0.15, "int4": 0.8}[dtype]


@torch.no_grad()
def test_layers_whose_residual_stream_has_more_bits_are_left() -> None:
    model = build("Mamba").to(torch.bfloat16)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="bfloat16")
    assert len(fused(model, "recurrent mixer")) == 2
    assert fused(model, "recurrent layer") == []
    error = (model(IDS).logits - eager(IDS).logits).norm() / eager(IDS).logits.norm()
    assert error <= 0.05


@pytest.mark.parametrize("stem", ["Qwen3_5", "Lfm2", "GraniteMoeHybrid"])
@torch.no_grad()
def test_stock_code_goes_on_from_us_and_we_from_stock_code(stem: str) -> None:
    model = build(stem)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for first, then, cache in ((model, eager, caches[0]), (eager, model, caches[1])):
        first(IDS[:, :6], **{CACHE: cache})
        then(IDS[:, 6:9], **{CACHE: cache})
        expected = eager(IDS).logits[:, -1]
        first(IDS[:, 9:10], **{CACHE: cache})
        assert row_error(then(IDS[:, 10:], **{CACHE: cache}).logits[:, -1], expected) <= 1e-3


@pytest.mark.parametrize("stem", ["Qwen3_5", "Lfm2", "GraniteMoeHybrid"])
def test_beams_take_their_states_along(stem: str) -> None:
    model = build(stem)
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    settings = {"max_new_tokens": 16, "num_beams": 3, "do_sample": False, "attention_mask": MASK}
    assert torch.equal(model.generate(IDS, **settings), eager.generate(IDS, **settings))


def test_writing_to_a_parameter_of_a_mixer_is_noticed() -> None:
    model = build("GraniteMoeHybrid")
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for changed in (model, eager):
        with torch.no_grad():
            changed.model.layers[0].mamba.A_log.add_(0.5)
            changed.model.layers[0].input_layernorm.weight.mul_(2)
    with torch.no_grad():
        assert row_error(model(IDS).logits, eager(IDS).logits) <= 1e-3
        steps = []
        for changed in (model, eager):
            cache = DynamicCache(config=changed.config)
            changed(IDS, **{CACHE: cache})
            step = [changed(IDS[:, :1], **{CACHE: cache}).logits]
            changed.model.layers[2].mamba.D.mul_(2)  # between two steps
            changed.model.layers[2].mamba.conv1d.weight.mul_(1.5)
            steps.append([*step, changed(IDS[:, 1:2], **{CACHE: cache}).logits])
        assert all(row_error(ours, theirs) <= 1e-3 for ours, theirs in zip(*steps, strict=True))


def test_hooks_inside_see_what_passes() -> None:
    model = build("Lfm2")
    accelerate_for_cpu(model, dtype="float32")
    seen: list[int] = []
    model.model.layers[0].conv.in_proj.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(IDS)
    assert seen == [1]
