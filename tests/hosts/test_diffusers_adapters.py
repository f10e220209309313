"""Adapters that a pipeline changes in the layers of its models, as diffusers does it; peft, whose layers they are, has a stand-in.

With peft itself: tests/diffusion/adapters_of_peft.py.
"""

from __future__ import annotations

import copy

import diffusers
import numpy as np
import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu, accelerated, explain, restore
from tests.hosts.diffusion_pipelines import stable_diffusion, unet


class Adapter(torch.nn.Module):
    """What peft puts in the place of a linear, named as there."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(linear.in_features, 16, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(16, linear.out_features, bias=False)})
        self.merged = self.disable_adapters = False

    def forward(self, input):
        if self.disable_adapters and self.merged:
            self.unmerge()
        output = self.base_layer(input)
        if self.merged or self.disable_adapters or not self.lora_A:
            return output
        return output + self.lora_B["default"](self.lora_A["default"](input))

    def _change(self):
        return self.lora_B["default"].weight @ self.lora_A["default"].weight

    def merge(self):
        self.base_layer.weight.data += self._change()
        self.merged = True

    def unmerge(self):
        if self.merged:
            self.base_layer.weight.data -= self._change()
            self.merged = False

    def delete(self):
        del self.lora_A["default"], self.lora_B["default"]


def adapters(pipe):
    return [
        module
        for model in (pipe.text_encoder, pipe.unet)
        for module in model.modules()
        if isinstance(module, Adapter)
    ]


def on_each(change):
    """A method of a pipeline that goes to the layers, as those of diffusers do."""
    return lambda pipe: [change(adapter) for adapter in adapters(pipe)]


@pytest.fixture
def adapted(monkeypatch):
    """A pipeline with adapters around projections of its UNet and text encoder, and methods for them."""
    cls = diffusers.StableDiffusionPipeline
    monkeypatch.setattr(cls, "fuse_lora", on_each(Adapter.merge))
    monkeypatch.setattr(cls, "unfuse_lora", on_each(Adapter.unmerge))
    monkeypatch.setattr(cls, "delete_adapters", on_each(Adapter.delete))
    monkeypatch.setattr(
        cls, "disable_lora", on_each(lambda adapter: setattr(adapter, "disable_adapters", True))
    )
    monkeypatch.setattr(
        cls, "enable_lora", on_each(lambda adapter: setattr(adapter, "disable_adapters", False))
    )
    torch.manual_seed(0)
    pipe, _ = stable_diffusion()
    for model in (pipe.text_encoder, pipe.unet):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if name in ("q_proj", "v_proj", "to_q", "to_v"):
                    setattr(parent, name, Adapter(child).eval())
    return pipe


STEPS = (
    "fuse_lora",
    "unfuse_lora",
    "fuse_lora",
    "disable_lora",
    "enable_lora",
    "unfuse_lora",
    "delete_adapters",
)


def draw(pipe):
    generator = torch.Generator().manual_seed(0)
    arguments = {"prompt": "a small house", "height": 16, "width": 16, "num_inference_steps": 2}
    return pipe(**arguments, output_type="np", generator=generator).images


def drawn_after(pipe, steps):
    """The images after each of the steps."""
    made = []
    for step in steps:
        getattr(pipe, step)()
        made.append(draw(pipe))
    return made


@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_pipeline_changes_its_adapters_before_and_after_accelerating(adapted, first):
    expected = drawn_after(copy.deepcopy(adapted), STEPS)
    assert np.abs(expected[0] - expected[-1]).max() > 1e-3
    drawn_after(adapted, STEPS[:first])
    accelerate_for_cpu(adapted, dtype="float32")
    for ours, theirs in zip(drawn_after(adapted, STEPS[first:]), expected[first:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert any(item.name.startswith("unet") for item in explain(adapted).replaced)
    restore(adapted)
    np.testing.assert_array_equal(draw(adapted), expected[-1])
    assert not set(STEPS) & set(vars(adapted))


def test_layers_with_a_fused_adapter_are_packed(adapted):
    accelerate_for_cpu(adapted, dtype="float32")
    adapted.fuse_lora()
    wrapped = [item.name for item in explain(adapted).replaced if item.name.endswith("base_layer")]
    assert wrapped
    assert all(name.startswith("unet") for name in wrapped)


def test_one_that_was_switched_off_while_fused_stays_plain_and_says_so(adapted):
    accelerate_for_cpu(adapted, dtype="float32")
    adapted.fuse_lora()
    adapted.disable_lora()
    reasons = {item.reason for item in explain(adapted.unet).items if item.name.endswith("to_q.base_layer")}
    assert reasons == {"its merged adapter is disabled, and the next call unmerges it"}


def test_a_failing_change_leaves_the_pipeline_accelerated(adapted, monkeypatch):
    def fail(pipe):
        raise ValueError("no such adapter")

    monkeypatch.setattr(type(adapted), "set_adapters", fail)
    accelerate_for_cpu(adapted, dtype="float32")
    plan = explain(adapted)  # before the first call, which settles that of recorded layers
    before = draw(adapted)
    with pytest.raises(ValueError, match="no such adapter"):
        adapted.set_adapters()
    assert explain(adapted) == plan
    np.testing.assert_array_equal(draw(adapted), before)


def test_without_the_original_weights_nothing_is_touched(adapted):
    accelerate_for_cpu(adapted, dtype="bfloat16", originals="drop")
    plan = explain(adapted)
    with pytest.raises(RuntimeError, match="originals='drop'"):
        adapted.fuse_lora()
    assert explain(adapted) == plan


def test_another_pipeline_of_the_same_models_is_followed_once_it_is_accelerated_too(adapted):
    expected = draw(adapted)
    accelerate_for_cpu(adapted, dtype="float32")
    plan = explain(adapted)
    other = diffusers.StableDiffusionPipeline(**adapted.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    with pytest.raises(RuntimeError, match="read-only"):
        other.fuse_lora()
    accelerate_for_cpu(other, dtype="float32")
    assert explain(adapted) == plan
    other.unfuse_lora()
    other.fuse_lora()
    assert all(adapter.merged for adapter in adapters(other))
    np.testing.assert_allclose(draw(adapted), expected, atol=2e-4)


def test_a_copy_has_methods_of_its_own(adapted):
    accelerate_for_cpu(adapted, dtype="float32")
    other = copy.deepcopy(adapted)
    expected = draw(other)
    other.fuse_lora()
    assert all(adapter.merged for adapter in adapters(other))
    assert not any(adapter.merged for adapter in adapters(adapted))
    np.testing.assert_allclose(draw(other), expected, atol=2e-4)
    restore(other)
    assert explain(adapted).replaced


def test_the_context_manager_takes_the_methods_back(adapted):
    with accelerated(adapted, dtype="float32"):
        assert "unfuse_lora" in vars(adapted)
    assert "unfuse_lora" not in vars(adapted)


def test_models_alone_have_no_methods_of_pipelines():
    model = unet()
    accelerate_for_cpu(model, dtype="float32")
    assert "load_lora_weights" not in vars(model)
