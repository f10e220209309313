"""The models that an engine supports, and the maximum length of their sequences."""

import pytest
import torch
import transformers
from torch import nn

from hf_cpu_accel.serve.engine import Engine
from tests.generate.decoders import accelerated, build
from tests.rewrite.decoder.decoder_families import DECODERS, SCALED


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config).eval()


def heed_no_mask(module, args, inputs):
    return args, {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}


def stand_where_the_longest_stands(module, args, inputs):
    positions = inputs["position_ids"]
    return args, {**inputs, "position_ids": positions.amax(0, keepdim=True).expand_as(positions)}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("t5"), "T5ForConditionalGeneration is not supported: it has an encoder"),
        # Before transformers 5.24 its forward took what it keeps under another name than that of caches.
        (
            mamba,
            "MambaForCausalLM is not supported: its cache has layers with more state than keys and values",
        ),
        (lambda: nn.Linear(3, 3), "Linear is not supported: it does not generate"),
        (lambda: build("llama").model, "LlamaModel is not supported: it does not generate"),
    ],
)
def test_unsupported_models_are_rejected(make, reason):
    with pytest.raises(ValueError, match=f"model={reason}.*accepted are transformers decoders"):
        Engine(make())


@pytest.mark.parametrize("change", [heed_no_mask, stand_where_the_longest_stands])
def test_models_that_ignore_masks_are_rejected(change):
    model = build("gpt2")
    Engine(model).close()
    model.register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises(
        ValueError, match="model=GPT2LMHeadModel is not supported: its logits in a batch differ"
    ):
        Engine(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows=0: expected a whole number from 1"),
        ({"waiting": 2.0}, "waiting=2.0"),
        ({"prefill_chunk": True}, "prefill_chunk=True"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes=-1: expected a whole number from 0"),
        ({"max_length": 513}, "max_length=513: expected a whole number from 2 to 512"),
        ({"max_length": 1}, "max_length=1"),
    ],
)
def test_wrong_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Engine(accelerated("llama"), **settings)


def test_a_model_without_a_limit_needs_one():
    with pytest.raises(ValueError, match="max_length=None: the config of BloomForCausalLM has no"):
        Engine(accelerated("bloom"))
    with Engine(accelerated("bloom"), max_length=20) as engine:
        assert engine.max_length == 20


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_of_the_longest_sequence_set_the_limit(kind):
    model = SCALED[kind].build()
    with Engine(model) as engine:
        assert engine.max_length == 32
    with pytest.raises(ValueError, match="from 2 to 32"):
        Engine(model, max_length=33)


def test_other_scaled_positions_do_not():
    with Engine(SCALED["yarn"].build()) as engine:
        assert engine.max_length == 512


def test_layouts_of_the_kv_cache():
    with Engine(DECODERS["gemma3"].build()) as engine:  # windows keep all tokens here
        assert engine._scheduler._forward.layout.token_bytes == 3 * 2 * 2 * 32 * 4
