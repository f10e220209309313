"""Models of the last years: their sizes, and what is asked of those that write and that code sound, from tiny ones."""

import pytest
import torch

from benchmarks import workloads
from benchmarks.workloads import recent
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli import random_models

# Millions of parameters, and the shape of the answer for a batch of two where it needs no values.
_SIZES = {
    "smolvlm-256m": (256.5, None),
    "parakeet-0.6b-encoder": (607.7, (2, 125, 1024)),
    "mimi": (79.3, None),
    "dac": (76.6, None),
    "beit-base": (85.8, (2, 197, 768)),
    "deformable-detr-r50": (39.9, None),
    "wan-1.3b-blocks": (118.7, (2, 16, 160, 48)),
    "z-image-blocks": (373.7, (2, 16, 64, 64)),
}


@pytest.mark.parametrize("name", recent.MODELS)
def test_they_are_of_the_published_sizes(name: str) -> None:
    workload, (millions, shape) = workloads.parse(f"{name}:2"), _SIZES[name]
    with torch.device("meta"):
        model = workload.build()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions
    inputs = workload.inputs(model)
    assert {len(tensor) for tensor in inputs.values()} == {2}
    if shape is not None:
        with torch.device("meta"):
            (output,) = workload.forward(model, {key: tensor.to("meta") for key, tensor in inputs.items()})
        assert tuple(output.shape) == shape


def test_the_same_is_written_about_an_image_in_float32() -> None:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    text = {"model_type": "llama", "vocab_size": 49280, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 512, "patch_size": 16}
    options = {"scale_factor": 4, "image_token_id": 49190, "pad_token_id": 2}
    config = Idefics3Config(text_config=text, vision_config=vision, **options)
    model = random_models.seeded(lambda: Idefics3ForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    _, make_inputs, answer = recent.MODELS["smolvlm-256m"]
    inputs = make_inputs(2, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = answer(model, inputs)
        assert expected.shape == (2, 64)
        accelerate_for_cpu(model, dtype="float32")
        assert torch.equal(answer(model, inputs), expected)


def test_sound_is_encoded_and_decoded() -> None:
    from transformers import MimiConfig, MimiModel

    small = {"num_filters": 8, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "upsample_groups": 64}
    model = random_models.seeded(lambda: MimiModel(MimiConfig(**small)))
    _, make_inputs, answer = recent.MODELS["mimi"]
    inputs = make_inputs(1, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = answer(model, inputs)
        assert expected.shape == (1, 1, 96000)
        accelerate_for_cpu(model, dtype="float32")
        torch.testing.assert_close(answer(model, inputs), expected, rtol=1e-4, atol=1e-5)


def test_music_is_coded_and_played() -> None:
    from transformers import DacConfig, DacModel

    model = random_models.seeded(lambda: DacModel(DacConfig(encoder_hidden_size=8, decoder_hidden_size=64)))
    _, make_inputs, answer = recent.MODELS["dac"]
    inputs = make_inputs(1, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = answer(model, inputs)
        assert expected.shape == (1, 44032)
        accelerate_for_cpu(model, dtype="float32")
        torch.testing.assert_close(answer(model, inputs), expected, rtol=1e-4, atol=1e-5)
