"""The form of four-bit weights follows what they are."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.packing.four_bits import nearest_form
from tests.packing.test_affine import random_groups


def test_trained_weights_are_rotated_and_those_of_a_grid_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 256, generator=generator)
    on_a_grid = random_groups(256, 256, 4, 32).dequantize()
    assert nearest_form(weight, "int4", 32) == "int4"
    assert nearest_form(on_a_grid, "int4", 32) == "affine4"
    assert nearest_form(on_a_grid, "int8", 32) == "int8"
    assert nearest_form(weight[:0], "int4", 32) == "int4"


@pytest.fixture
def writer() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=160, **sizes)).eval()


def dtypes(model: LlamaForCausalLM) -> tuple[str, str]:
    """Of the head, and of a linear of a layer."""
    found = {item.name: item.dtype for item in explain(model).items}
    return found["lm_head"], found["model.layers.0.mlp.down_proj"]


def test_the_head_of_four_bits_has_eight_unless_asked_otherwise(writer: LlamaForCausalLM) -> None:
    for asked, head in (("auto", "int8"), ("int4", "int4"), ("bfloat16", "bfloat16")):
        accelerate_for_cpu(writer, dtype="int4", head_dtype=asked)
        assert dtypes(writer) == (head, "int4")
        restore(writer)
    accelerate_for_cpu(writer, dtype="int8")
    assert dtypes(writer) == ("int8", "int8")
    with pytest.raises(ValueError, match="head_dtype='int5' is unknown"):
        accelerate_for_cpu(writer, head_dtype="int5")


def test_a_dequantized_model_is_kept_exactly(writer: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for name, parameter in writer.named_parameters():
            if "proj" in name:
                parameter.copy_(random_groups(*parameter.shape, 4, 32).dequantize() / 8)
    ids = torch.randint(0, 160, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = writer.model(ids).last_hidden_state
        accelerate_for_cpu(writer, dtype="int4")
        given = writer.model(ids).last_hidden_state
    assert dtypes(writer) == ("int8", "affine4")
    assert (given - expected).norm() <= 1e-3 * expected.norm()
