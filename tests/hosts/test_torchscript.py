"""Models that TorchScript has compiled in part: what it compiled stays as it is, and all around it is accelerated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error

_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(5, 90, (2, 9))}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], tuple[str, ...]]] = {
    "bert": (
        lambda: tf.BertModel(tf.BertConfig(vocab_size=100, **_SIZE)),
        _text,
        ("GELUActivation", "Linear", "LayerNorm", "BertIntermediate", "Dropout"),
    ),
    "llama": (
        lambda: tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=100, num_key_value_heads=2, **_SIZE)),
        _text,
        ("SiLUActivation", "LlamaMLP", "Linear", "Embedding"),
    ),
    "gpt2": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)),
        _text,
        ("LayerNorm", "NewGELUActivation"),
    ),
    "vit": (
        lambda: tf.ViTModel(tf.ViTConfig(image_size=32, patch_size=8, **_SIZE)),
        _image,
        ("GELUActivation", "Conv2d", "Linear"),
    ),
    "resnet": (
        lambda: tf.ResNetModel(tf.ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[1, 2])),
        _image,
        ("BatchNorm2d", "Conv2d", "ReLU", "ResNetConvLayer", "MaxPool2d"),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("name", "compiled"), [(name, kind) for name, (_, _, kinds) in MODELS.items() for kind in kinds]
)
def test_what_torchscript_compiled_stays_and_the_rest_is_accelerated(
    name: str, compiled: str, dtype: str
) -> None:
    make, inputs, _ = MODELS[name]
    model, batch = make().eval(), inputs()
    scripted = _script(model, compiled)
    with torch.no_grad():
        expected = model(**batch)[0]
        accelerate_for_cpu(model, dtype=dtype)
        first, again = model(**batch)[0], model(**batch)[0]
        bound = 1e-5 if dtype == "float32" else 0.05
        for output in (first, again):
            assert (output - expected).norm() / expected.norm() < bound
        assert all(part in set(model.modules()) for part in scripted)
        restore(model)
        assert torch.equal(model(**batch)[0], expected)


def _script(model: nn.Module, kind: str) -> list[nn.Module]:
    made = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == kind:
                made.append(torch.jit.script(child))
                setattr(parent, name, made[-1])
    assert made
    return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


@pytest.mark.parametrize(
    "compiled",
    [torch.jit.script, lambda block: torch.jit.trace(block, torch.randn(2, 64))],
    ids=["script", "trace"],
)
def test_the_plan_says_that_torchscript_runs_its_own(compiled: Any) -> None:
    model = nn.Sequential(compiled(Block().eval()), Block()).eval()
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = model(x)
        accelerate_for_cpu(model, dtype="float32")
        assert row_error(model(x), expected) < 1e-5
    rows = {item.name: item for item in explain(model).items}
    assert rows["1.linear"].reason is None
    assert all("TorchScript" in str(rows[name].reason) for name in ("0.linear", "0.norm"))


def test_a_compiled_target_is_refused_with_the_way_out() -> None:
    model = torch.jit.script(Block().eval())
    with pytest.raises(TypeError, match=r"target is compiled by TorchScript.*the module as it was before"):
        accelerate_for_cpu(model)
