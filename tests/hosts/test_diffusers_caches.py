"""Step caches of diffusers are hooks on blocks, attention and other modules: they skip as much of an accelerated model as of the
original, whether they come before it is accelerated or after."""

from __future__ import annotations

import collections

import diffusers
import numpy as np
import pytest
import torch
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip, apply_pyramid_attention_broadcast
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.attention.processor import ProcessorForward
from tests.hosts.diffusion_pipelines import flux, stable_diffusion, stable_diffusion_3

STEPS = 8
_BLOCKS = ["transformer_blocks", "single_transformer_blocks"]
_TAYLOR = {"cache_interval": 3, "disable_cache_before_step": 2, "taylor_factors_dtype": torch.float32}

CACHES = {
    "first block": lambda pipe: diffusers.FirstBlockCacheConfig(threshold=100.0),
    "pyramid": lambda pipe: diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 900),
        spatial_attention_block_identifiers=_BLOCKS,
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "faster": lambda pipe: diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 901),
        spatial_attention_block_identifiers=_BLOCKS,
        attention_weight_callback=lambda module: 0.5,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "taylor": lambda pipe: diffusers.TaylorSeerCacheConfig(**_TAYLOR),
    "taylor lite": lambda pipe: diffusers.TaylorSeerCacheConfig(use_lite_mode=True, **_TAYLOR),
    "taylor of linears": lambda pipe: diffusers.TaylorSeerCacheConfig(
        cache_identifiers=[r"transformer_blocks\.\d+\.ff", r".*ff_context\.net\.2", r".*to_k"], **_TAYLOR
    ),
    "magnitudes": lambda pipe: diffusers.MagCacheConfig(
        threshold=0.3, num_inference_steps=STEPS, retention_ratio=0.2, mag_ratios=torch.ones(STEPS)
    ),
}


@pytest.fixture
def calls(monkeypatch):
    """How often blocks were computed, and attention in them."""
    counts = collections.Counter()

    def count(owner, name, what):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[what] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for block in (FluxTransformerBlock, FluxSingleTransformerBlock):
        count(block, "forward", "blocks")
    count(transformer_flux, "dispatch_attention_fn", "attentions")
    return counts


def drawn(pipe, call, calls):
    """The image, and what was called for it."""
    calls.clear()
    image = call(num_inference_steps=STEPS)
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).reset_stateful_hooks()
    return image, dict(calls)


def enable(pipe, name):
    pipe.transformer.enable_cache(CACHES[name](pipe))
    # diffusers 0.39 keeps the list of hooks of an earlier image, without the cache's, and by itself then raises, too.
    HookRegistry.check_if_exists_or_initialize(pipe.transformer)._child_registries_cache = None


def check(given, expected, exactly=False):
    np.testing.assert_allclose(given[0], expected[0], atol=0 if exactly else 5e-6)
    assert given[1] == expected[1]


def attentions(pipe):
    """The number of those in the transformer that are served."""
    items = explain(pipe.transformer).replaced
    return sum(item.structure == "attention" for item in items)


@pytest.fixture
def pipe_and_call():
    torch.manual_seed(0)
    return flux()


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_comes_later(name, pipe_and_call, calls):
    pipe, call = pipe_and_call
    plain = drawn(pipe, call, calls)
    enable(pipe, name)
    cached = drawn(pipe, call, calls)
    assert np.abs(cached[0] - plain[0]).max() > 5e-5
    pipe.transformer.disable_cache()

    accelerate_for_cpu(pipe, dtype="float32")
    assert attentions(pipe) == 2  # although the hooks have left an attribute each
    check(drawn(pipe, call, calls), plain)
    enable(pipe, name)
    check(drawn(pipe, call, calls), cached)
    restore(pipe)
    check(drawn(pipe, call, calls), cached, exactly=True)
    accelerate_for_cpu(pipe, dtype="float32")
    check(drawn(pipe, call, calls), cached)
    pipe.transformer.disable_cache()
    check(drawn(pipe, call, calls), plain)
    restore(pipe)
    check(drawn(pipe, call, calls), plain, exactly=True)


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_is_there_already(name, pipe_and_call, calls):
    pipe, call = pipe_and_call
    plain = drawn(pipe, call, calls)
    enable(pipe, name)
    cached = drawn(pipe, call, calls)
    accelerate_for_cpu(pipe, dtype="float32")
    assert attentions(pipe) == 2
    check(drawn(pipe, call, calls), cached)
    pipe.transformer.disable_cache()
    check(drawn(pipe, call, calls), plain)
    assert all(
        _is_served(module) for module in pipe.transformer.modules() if isinstance(module, FluxAttention)
    )
    restore(pipe)
    check(drawn(pipe, call, calls), plain, exactly=True)
    enable(pipe, name)
    check(drawn(pipe, call, calls), cached, exactly=True)


def _is_served(attention):
    return isinstance(attention.forward, ProcessorForward) and attention.forward.is_on


def test_attention_of_unets_is_skipped_too():
    torch.manual_seed(0)
    pipe, call = stable_diffusion()
    plain = call(num_inference_steps=STEPS)
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=4,
        spatial_attention_block_identifiers=["transformer_blocks"],
        current_timestep_callback=lambda: 500,
    )
    apply_pyramid_attention_broadcast(pipe.unet, config)

    def skipping():
        HookRegistry.check_if_exists_or_initialize(pipe.unet).reset_stateful_hooks()
        return call(num_inference_steps=STEPS)

    expected = skipping()
    assert np.abs(expected - plain).max() > 1e-3
    accelerate_for_cpu(pipe, dtype="float32")
    np.testing.assert_allclose(skipping(), expected, atol=2e-4)
    HookRegistry.check_if_exists_or_initialize(pipe.unet).remove_hook("pyramid_attention_broadcast")
    np.testing.assert_allclose(call(num_inference_steps=STEPS), plain, atol=2e-4)
    apply_pyramid_attention_broadcast(pipe.unet, config)
    np.testing.assert_allclose(skipping(), expected, atol=2e-4)
    restore(pipe)
    np.testing.assert_array_equal(skipping(), expected)


def test_caches_that_skip_a_batch_of_the_whole_model():
    """FasterCache computes the half without the prompt from the other one: a hook on the root."""
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=6,
    ).eval()
    now = [0]
    config = diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 901),
        unconditional_batch_skip_range=2,
        unconditional_batch_timestep_skip_range=(-1, 901),
        attention_weight_callback=lambda module: 0.5,
        tensor_format="BFCHW",
        current_timestep_callback=lambda: now[0],
    )
    batches = []
    model.proj_out.register_forward_hook(lambda module, args, output: batches.append(len(output)))

    @torch.no_grad()
    def outputs():
        batches.clear()
        made = []
        for now[0] in (950, 800, 600, 400, 200):
            generator = torch.Generator().manual_seed(now[0])
            made.append(
                model(
                    hidden_states=torch.randn(2, 3, 4, 8, 8, generator=generator),
                    encoder_hidden_states=torch.randn(2, 6, 32, generator=generator),
                    timestep=torch.tensor([now[0]] * 2),
                    return_dict=False,
                )[0].clone()
            )
        model._reset_stateful_cache()
        return torch.stack(made), list(batches)

    plain, _ = outputs()
    model.enable_cache(config)
    cached, sizes = outputs()
    assert 1 in sizes
    assert not torch.allclose(cached, plain, atol=1e-3)
    for _ in range(2):  # accelerated after the cache, and before it
        accelerate_for_cpu(model, dtype="float32")
        given, ours = outputs()
        assert ours == sizes
        torch.testing.assert_close(given, cached, atol=1e-4, rtol=1e-4)
        model.disable_cache()
        torch.testing.assert_close(outputs()[0], plain, atol=1e-4, rtol=1e-4)
        model.enable_cache(config)
        given, ours = outputs()
        assert ours == sizes
        torch.testing.assert_close(given, cached, atol=1e-4, rtol=1e-4)
        restore(model)
        assert torch.equal(outputs()[0], cached)


@pytest.mark.parametrize("skipped", ["skip_ff", "skip_attention", "skip_attention_scores"])
def test_guidance_skips_parts_of_blocks(skipped, monkeypatch):
    """Modular pipelines put such hooks on and take them off in every step; those on fused networks survive `restore`."""
    torch.manual_seed(0)
    pipe, call = stable_diffusion_3()
    skipped_output = AttentionProcessorMetadata(
        lambda module, hidden_states, encoder_hidden_states: (hidden_states, encoder_hidden_states)
    )
    AttentionProcessorRegistry._register()
    monkeypatch.setitem(AttentionProcessorRegistry._registry, JointAttnProcessor2_0, skipped_output)
    nothing = {"skip_ff": False, "skip_attention": False, "skip_attention_scores": False}
    config = LayerSkipConfig(indices=[0], fqn="transformer_blocks", **{**nothing, skipped: True})

    def unhook():
        HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook("layer_skip_hook")

    plain = call()
    apply_layer_skip(pipe.transformer, config)
    expected = call()
    assert np.abs(expected - plain).max() > 5e-5
    accelerate_for_cpu(pipe, dtype="float32")
    np.testing.assert_allclose(call(), expected, atol=5e-6)
    unhook()
    np.testing.assert_allclose(call(), plain, atol=5e-6)
    accelerate_for_cpu(pipe, dtype="float32", threads=1)
    apply_layer_skip(pipe.transformer, config)
    np.testing.assert_allclose(call(), expected, atol=5e-6)
    restore(pipe)
    np.testing.assert_array_equal(call(), expected)
    unhook()
    np.testing.assert_array_equal(call(), plain)


def test_a_forward_of_somebody_else_is_left_alone(pipe_and_call):
    pipe, _ = pipe_and_call
    attention = pipe.transformer.transformer_blocks[0].attn
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, **kwargs)
    accelerate_for_cpu(pipe, dtype="float32")
    reasons = {
        item.reason for item in explain(pipe).items if item.name == "transformer.transformer_blocks.0.attn"
    }
    assert reasons == {"it has a forward of its own"}
