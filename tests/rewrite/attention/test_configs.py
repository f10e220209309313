"""The config of an accelerated model names its attention, and has its old value after `restore`."""

import copy

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.hosts.arguments import NATIVE_ATTENTION
from hf_cpu_accel.rewrite.attention import interface
from hf_cpu_accel.rewrite.decoder.layer import FusedDecoderLayer
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer
from tests.patching.test_hooks_after_acceleration import MODELS
from tests.rewrite.families import FAMILIES, batches


def test_configs_are_copied_alike_and_come_back():
    model = FAMILIES["bart"].build()
    config, holders = (
        model.config,
        {p: m for p, m in model.named_modules() if vars(m).get("config") is model.config},
    )
    assert len(holders) > 3
    accelerate_for_cpu(model, dtype="float32")
    assert model.config is not config
    assert model.config._attn_implementation == NATIVE_ATTENTION
    assert config._attn_implementation == "sdpa"
    assert all(model.get_submodule(path).config is model.config for path in holders)
    restore(model)
    assert all(module.config is config for module in holders.values())
    assert config._attn_implementation == "sdpa"


def test_what_is_set_on_the_config_meanwhile_is_kept():
    model = FAMILIES["bert"].build()
    accelerate_for_cpu(model, dtype="float32")
    model.config.problem_type = "regression"
    restore(model)
    assert model.config.problem_type == "regression"


def test_configs_of_parts_stay_parts_of_the_config():
    text = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    vision = {**text, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = transformers.CLIPModel(config).eval()
    pixels, ids = torch.randn(2, 3, 16, 16), torch.randint(0, 90, (2, 5))
    with torch.no_grad():
        before = model(pixel_values=pixels, input_ids=ids).logits_per_image
        accelerate_for_cpu(model, dtype="float32")
        assert explain(model).counts()["attention"] == 2
        assert model.config is not config
        assert model.config.text_config is model.text_model.config
        assert model.config.vision_config is model.vision_model.config
        assert model.config.text_config._attn_implementation == NATIVE_ATTENTION
        assert config.text_config._attn_implementation == "sdpa"
        output = model(pixel_values=pixels, input_ids=ids).logits_per_image
        torch.testing.assert_close(output, before, rtol=1e-4, atol=1e-5)
        restore(model)
        assert model.config is config
        assert model.text_model.config is config.text_config
        assert torch.equal(model(pixel_values=pixels, input_ids=ids).logits_per_image, before)


def test_eager_attention_is_left_with_its_weights():
    config = FAMILIES["bert"].make_config()
    config._attn_implementation = "eager"
    model = accelerate_for_cpu(FAMILIES["bert"].build(config), dtype="float32")
    assert model.config is config
    reasons = {item.reason for item in explain(model).left if item.structure == "attention"}
    assert reasons == {"attn_implementation='eager' is not supported, only 'sdpa'"}
    with torch.no_grad():
        output = model(**batches()["right"], output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(3, 4, 11, 11)] * 2


def test_hidden_states_are_still_captured():
    model = FAMILIES["bert"].build()
    batch = batches()["right"]
    with torch.no_grad():
        before = model(**batch, output_hidden_states=True).hidden_states
        accelerate_for_cpu(model, dtype="float32")
        after = model(**batch, output_hidden_states=True).hidden_states
    assert len(after) == len(before) == 3
    for given, expected in zip(after, before, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_a_wrong_attention_is_not_put_in_place(monkeypatch):
    monkeypatch.setattr(interface, "attention", lambda q, k, v, **options: q.transpose(1, 2) * 0)
    model = FAMILIES["bert"].build()
    config = model.config
    accelerate_for_cpu(model, dtype="float32")
    assert model.config is config
    left = [item for item in explain(model).left if item.structure == "attention"]
    assert len(left) == 2
    assert all("differs" in item.reason for item in left)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["bert", "vit", "llama", "mixtral", "gpt2"])
def test_attention_weights_that_the_config_asks_for(name: str, before: bool) -> None:
    """Layers are not told: transformers collects them where attention is called."""
    eager, call = MODELS[name][0](), MODELS[name][1]
    eager.eval().set_attn_implementation("eager")
    eager.config.output_attentions = before
    model = accelerate_for_cpu(copy.deepcopy(eager), dtype="float32")
    with torch.no_grad():
        model(call)
        for one in (eager, model):
            one.config.output_attentions = True
        expected, given = eager(call).attentions, model(call).attentions
        assert len(expected) == len(given) >= 2
        for ours, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for one in (eager, model):
            one.config.output_attentions = False
        assert not model(call).get("attentions")
    layers = [
        module for module in model.modules() if isinstance(module, FusedEncoderLayer | FusedDecoderLayer)
    ]
    assert not any(layer.is_watched_within for layer in layers)
