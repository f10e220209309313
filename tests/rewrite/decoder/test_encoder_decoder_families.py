"""Every family of encoder-decoders: the number of fused layers, and equal logits and tokens."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.generate.cache import CPUCache, CPUCrossCache
from hf_cpu_accel.rewrite.decoder.fuse import STRUCTURE
from tests.rewrite.decoder.encoder_decoder_families import FAMILIES, VOCABULARY, EncoderDecoder

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

STEPS = (1, 1, 3, 1)


def fused_layers(model: nn.Module) -> int:
    return sum(item.structure == STRUCTURE and item.reason is None for item in explain(model).items)


def caches(model: nn.Module, kind: str) -> object:
    config = model.config
    if kind == "ours":
        return EncoderDecoderCache(CPUCache(config), CPUCrossCache(config))
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


@torch.no_grad()
def steps(model: nn.Module, inputs: dict[str, Tensor], cache: object, *, beams: bool = False) -> Tensor:
    """Logits [tokens, vocabulary] of the beginning of a translation, of single tokens after it and of several at once."""
    generator = torch.Generator().manual_seed(0)
    states = encoded(model, inputs)
    if beams:
        states = states.repeat_interleave(2, dim=0)
    mask = inputs.get("attention_mask")
    known = {} if mask is None else {"attention_mask": mask.repeat_interleave(2, dim=0) if beams else mask}
    logits = []
    for step in (2, *STEPS):
        ids = torch.randint(3, VOCABULARY, (len(states), step), generator=generator)
        outputs = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=ids,
            past_key_values=cache,
            use_cache=cache is not None,
            **known,
        )
        logits.append(outputs.logits.flatten(0, 1))
        if beams:
            cache.reorder_cache(torch.tensor([1, 0, 3, 3]))
    return torch.cat(logits)


@torch.no_grad()
def encoded(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model.get_encoder()(**inputs).last_hidden_state


@every_family
def test_same_logits_in_float32(family: EncoderDecoder) -> None:
    model = family.build()
    inputs = family.inputs(padded=True)
    expected = steps(model, inputs, caches(model, "theirs"))
    without = steps(model, inputs, None)
    beams = steps(model, inputs, caches(model, "theirs"), beams=True)
    accelerate_for_cpu(model, dtype="float32")
    assert fused_layers(model) == family.fused
    for kind in ("ours", "theirs"):
        assert row_error(steps(model, inputs, caches(model, kind)), expected) <= 1e-4, kind
        assert row_error(steps(model, inputs, caches(model, kind), beams=True), beams) <= 1e-4, kind
    assert row_error(steps(model, inputs, None), without) <= 1e-4
    restore(model)
    assert torch.equal(steps(model, inputs, caches(model, "theirs")), expected)


@every_family
def test_same_tokens(family: EncoderDecoder) -> None:
    model = family.build(seed=1)
    inputs = family.inputs(padded=True)
    settings = [
        {"max_new_tokens": 132},  # more than the 128 that the cache holds at first
        {"max_new_tokens": 24, "num_beams": 2},
        {"max_new_tokens": 24, "num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": 2.0},
    ]
    expected = [model.generate(**inputs, do_sample=False, **asked) for asked in settings]
    accelerate_for_cpu(model, dtype="float32")
    for asked, tokens in zip(settings, expected, strict=True):
        assert torch.equal(model.generate(**inputs, do_sample=False, **asked), tokens), asked


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def built(request: pytest.FixtureRequest) -> tuple[EncoderDecoder, nn.Module, Tensor]:
    """(family, its model, what `steps` gives for that), once for all dtypes; the model is to be copied."""
    family: EncoderDecoder = request.param
    model = family.build()
    return family, model, steps(model, family.inputs(padded=True), caches(model, "theirs"))


@pytest.mark.parametrize(
    ("dtype", "similarity"), [("bfloat16", 0.999), ("int8", 0.98), ("int8-weight", 0.99), ("int4", 0.8)]
)
def test_reduced_precision_stays_close(
    built: tuple[EncoderDecoder, nn.Module, Tensor], dtype: str, similarity: float
) -> None:
    family, eager, expected = built
    model, inputs = copy.deepcopy(eager), family.inputs(padded=True)
    accelerate_for_cpu(model, dtype=dtype)
    assert fused_layers(model) == family.fused
    logits = steps(model, inputs, caches(model, "ours"))
    assert torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0) >= similarity


def test_models_in_bfloat16(built: tuple[EncoderDecoder, nn.Module, Tensor]) -> None:
    family, eager, expected = built
    model, inputs = copy.deepcopy(eager), family.inputs(padded=True)
    model.to(torch.bfloat16)
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
    accelerate_for_cpu(model, dtype="bfloat16")
    assert fused_layers(model) == family.fused
    logits = steps(model, inputs, caches(model, "ours"))
    assert logits.dtype is torch.bfloat16
    assert torch.cosine_similarity(logits.float().flatten(), expected.flatten(), dim=0) >= 0.99


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_attention_weights_come_from_the_layers_own_forward(name: str) -> None:
    """In the middle of a text: what fused layers put into the cache is there for others, and the other way round."""
    family = FAMILIES[name]
    model = family.build()
    states, inputs = encoded(model, family.inputs()), {}
    ids = torch.tensor([[2, 5, 6, 7, 8, 9], [2, 9, 8, 7, 6, 5]])

    @torch.no_grad()
    def run(cache: object) -> list[Tensor]:
        given = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "past_key_values": cache}
        outputs = [
            model(decoder_input_ids=ids[:, first:last], output_attentions=first == 2, **given, **inputs)
            for first, last in ((0, 2), (2, 3), (3, 6))
        ]
        return [*(output.logits for output in outputs), *outputs[1].cross_attentions]

    model.set_attn_implementation("eager")
    expected = run(caches(model, "theirs"))
    model.set_attn_implementation("sdpa")
    accelerate_for_cpu(model, dtype="float32")
    first = run(caches(model, "ours"))[0]
    assert row_error(first, expected[0]) <= 1e-4
    for ours, theirs in zip(run(caches(model, "ours"))[:3], expected[:3], strict=True):
        assert row_error(ours, theirs) <= 1e-4


def test_a_layer_that_is_left_is_handed_the_bias_of_the_fused_one_before() -> None:
    family = FAMILIES["t5"]
    model = family.build()
    inputs = family.inputs(padded=True)
    expected = steps(model, inputs, caches(model, "theirs"))
    accelerate_for_cpu(model, dtype="float32", skip_modules=["decoder.block.1"])
    assert fused_layers(model) == 2
    assert row_error(steps(model, inputs, caches(model, "ours")), expected) <= 1e-4


def test_copies_of_a_model_write_the_same() -> None:
    family = FAMILIES["t5"]
    model = accelerate_for_cpu(family.build(), dtype="float32")
    inputs = family.inputs()
    expected = steps(model, inputs, caches(model, "ours"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(steps(other, inputs, caches(other, "ours")), expected)


def test_cross_keys_are_made_once_per_text() -> None:
    model = FAMILIES["bart"].build()
    accelerate_for_cpu(model, dtype="float32")
    inputs = FAMILIES["bart"].inputs(padded=True)
    output = model.generate(
        **inputs, num_beams=3, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    layers = output.past_key_values.cross_attention_cache.layers
    assert [layer.key_storage.shape[0] for layer in layers] == [2, 2, 2]
    assert layers[0].encoder_sequences.tolist() == [0, 0, 0, 1, 1, 1]
    assert layers[0].keys.shape == (6, 4, 9, 16)


def test_weights_that_are_cast_keep_their_bias_of_distances() -> None:
    model = FAMILIES["t5"].build()
    accelerate_for_cpu(model, dtype="float32")
    inputs = FAMILIES["t5"].inputs()
    before = steps(model, inputs, caches(model, "ours"))
    bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias
    with torch.no_grad():
        bias.weight.neg_()
    model.to(torch.float32)
    after = steps(model, inputs, caches(model, "ours"))
    assert row_error(after, before) > 1e-2
    assert row_error(after, steps(model, inputs, caches(model, "theirs"))) <= 1e-4
