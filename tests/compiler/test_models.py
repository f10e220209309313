"""What becomes of stock models of transformers: how much is fused, exactly, and that answers stay what they are for all lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler import report, torch_private
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from tests.compiler.conftest import only_graph

LAYERS = 2
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def bert() -> nn.Module:
    return BertModel(BertConfig(vocab_size=100, **SIZES))


def llama() -> nn.Module:
    return LlamaModel(LlamaConfig(vocab_size=100, num_key_value_heads=2, use_cache=False, **SIZES))


def gemma3() -> nn.Module:
    config = Gemma3TextConfig(vocab_size=100, num_key_value_heads=2, head_dim=16, use_cache=False, **SIZES)
    return Gemma3TextModel(config)


def t5() -> nn.Module:
    return T5EncoderModel(
        T5Config(d_model=64, num_layers=LAYERS, num_heads=4, d_kv=16, d_ff=128, vocab_size=100)
    )


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=100, use_cache=False))


def vit() -> nn.Module:
    return ViTModel(ViTConfig(image_size=32, patch_size=8, **SIZES))


# Rewrites of each pass in a model of 2 layers, and what the graph then consists of besides Inductor's part.
ENCODER = (
    {
        "norm": 5,
        "attention": 2,
        "linear": 13,
        "parallel_linears": 2,
        "activation": 3,
        "residual": 4,
        "ffn": 2,
        "encoder_layer": 2,
    },
    {"layer_norm": 1, "encoder_layer": 2, "linear": 1},
)
FUSED: dict[Callable[[], nn.Module], tuple[dict[str, int], dict[str, int]]] = {
    bert: ENCODER,
    vit: ENCODER,
    llama: (
        {
            "norm": 5,
            "rotary": 4,
            "attention": 2,
            "linear": 14,
            "gated_ffn": 2,
            "parallel_linears": 2,
            "residual": 4,
        },
        {
            "rms_norm": 5,
            "linear_split": 2,
            "rotary_embedding": 4,
            "attention": 2,
            "linear": 2,
            "gated_ffn": 2,
        },
    ),
    gemma3: (
        {
            "constants": 13,  # 1 + weight
            "norm": 13,
            "rotary": 4,
            "attention": 2,
            "linear": 14,
            "gated_ffn": 2,
            "parallel_linears": 2,
            "add_norm": 3,
        },
        {
            "rms_norm": 10,
            "add_rms_norm": 3,
            "linear_split": 2,
            "rotary_embedding": 4,
            "attention": 2,
            "linear": 2,
            "gated_ffn": 2,
        },
    ),
    t5: (
        {
            "norm": 5,
            "attention": 2,
            "linear": 12,
            "parallel_linears": 2,
            "activation": 2,
            "residual": 4,
            "ffn": 2,
        },
        {"rms_norm": 5, "linear_split": 2, "attention": 2, "linear": 2, "ffn": 2},
    ),
    gpt2: (
        {"norm": 5, "attention": 2, "linear": 8, "activation": 2, "residual": 4, "ffn": 2},
        {"layer_norm": 5, "attention": 2, "linear": 4, "ffn": 2},
    ),
}


def inputs(make: Callable[[], nn.Module], batch: int, length: int) -> dict[str, Tensor]:
    if make is vit:
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    mask = torch.ones(batch, length, dtype=torch.int64)
    if make is bert and length > 2:
        mask[0, -2:] = 0
    return {"input_ids": torch.randint(0, 100, (batch, length)), "attention_mask": mask}


@torch.no_grad()
def check(fast: Any, model: nn.Module, given: dict[str, Tensor], atol: float = 2e-5) -> None:
    got, expected = fast(**given)[0], model(**given)[0]
    if "attention_mask" in given:  # what stands at the padding is nobody's
        got, expected = (x[given["attention_mask"].bool()] for x in (got, expected))
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("make", FUSED)
def test_everything_that_matters_is_fused(
    make: Callable[[], nn.Module], compiled: Callable[..., Any]
) -> None:
    model = make().eval()
    check(compiled(model), model, inputs(make, 2, 9))
    rewrites, ops = FUSED[make]
    graph, counted = only_graph(), torch_private.counters("hf_cpu_accel")
    found = {name: n for name, n in graph.rewrites.items() if n and name not in ("simplify", "views")}
    assert found == rewrites
    assert {name: counted[name] for name in rewrites} == rewrites
    assert {name.split(".")[1]: n for name, n in graph.ours.items()} == ops


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("make", [bert, llama])
def test_one_graph_serves_all_lengths_and_batches(
    make: Callable[[], nn.Module], compiled: Callable[..., Any]
) -> None:
    model = make().eval()
    fast = compiled(model)
    shapes = random.Random(0)
    for _ in range(50):
        check(fast, model, inputs(make, shapes.randint(2, 8), shapes.randint(2, 96)))
    check(fast, model, inputs(make, 2, 512))
    assert len(report.graphs()) == 1


@pytest.mark.parametrize("make", [bert, llama])
def test_generated_code_agrees(make: Callable[[], nn.Module]) -> None:
    """As a user calls it, and recorded once: numbers of the model do not make Dynamo start over."""
    model = make().eval()
    fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
    for batch, length in ((2, 9), (3, 20), (5, 4)):
        check(fast, model, inputs(make, batch, length))
    assert only_graph().left is None
    assert not torch_private.counters("graph_break")


class Headed(nn.Module):
    """BERT, and two linears that pointwise operations go behind."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.first, self.second = bert(), nn.Linear(64, 64), nn.Linear(64, 41)

    def forward(self, **given: Tensor) -> tuple[Tensor]:
        return (torch.sin(self.second(torch.cos(self.first(self.bert(**given)[0])))),)


def test_code_without_python_between_kernels_agrees() -> None:
    """All functions of a graph in one file of C++, as AOTInductor has them, too: our ops, and templates around our tiles."""
    model = Headed().eval()
    torch_private.counters("inductor").clear()
    fast = torch.compile(
        model, backend=hf_cpu_accel, dynamic=True, options={"inductor": {"cpp_wrapper": True}}
    )
    for batch, length in ((2, 9), (3, 20)):
        check(fast, model, inputs(bert, batch, length))
    assert only_graph().left is None
    counted = torch_private.counters("inductor")
    assert (counted["cpp_templated_kernel_counter"], counted["cpp_epilogue_fusion_counter"]) == (2, 2)


def test_generated_code_around_convolutions_agrees() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Softsign(), nn.Conv2d(64, 64, 1)).eval()
    fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True, options={"dtype": "int8"})
    for batch, side in ((2, 9), (3, 12)):
        image = torch.randn(batch, 64, side, 8)
        with torch.no_grad():
            got, expected = fast(image), model(image)
        assert 0 < (got - expected).norm() < 0.03 * expected.norm()
    assert only_graph().ours == {"hf_cpu_accel.conv2d.default": 2}


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_weights_stay_close(dtype: str, compiled: Callable[..., Any]) -> None:
    model = bert().eval()
    given = inputs(bert, 2, 9)
    with torch.no_grad():
        got, expected = compiled(model, dtype=dtype)(**given)[0], model(**given)[0]
    keep = given["attention_mask"].bool()
    error = (got - expected)[keep].norm() / expected[keep].norm()
    assert 0 < error < {"bfloat16": 0.02, "int8": 0.1}[dtype]


@pytest.mark.usefixtures("no_codegen")
def test_a_bfloat16_model_is_fused_alike(compiled: Callable[..., Any]) -> None:
    model, reference = llama().eval(), llama().eval()
    reference.load_state_dict(model.state_dict())
    given = inputs(llama, 2, 9)
    with torch.no_grad():
        expected = reference(**given)[0]
        got = compiled(model.bfloat16())(**given)[0]
    assert got.dtype is torch.bfloat16
    assert (got - expected).norm() / expected.norm() < 0.02
    assert {name.split(".")[1]: n for name, n in only_graph().ours.items()} == FUSED[llama][1]


@pytest.mark.usefixtures("no_codegen")
def test_an_accelerated_model_is_traced_whole(compiled: Callable[..., Any]) -> None:
    model = bert().eval()
    given = inputs(bert, 2, 9)
    with torch.no_grad():
        expected = model(**given)[0]
    accelerate_for_cpu(model, dtype="float32", originals="memory")
    keep = given["attention_mask"].bool()
    with torch.no_grad():
        got = compiled(model)(**given)[0]
    torch.testing.assert_close(got[keep], expected[keep], atol=2e-5, rtol=1e-4)
    assert only_graph().ours
