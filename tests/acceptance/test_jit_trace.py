"""`torch.jit.trace` of an accelerated model, as services that came from IPEX have it: for other lengths and batches, too."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.guard.values import KeptValues
from hf_cpu_accel.providers import switch
from tests.acceptance.modules import MODULES, classifier
from tests.compiler.families import FAMILIES

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
@torch.no_grad()
def test_a_trace_serves_other_sizes(
    weights: torch.dtype, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.VARIABLE, "auto")  # as users have it: other providers are looked at
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval().to(weights)
    accelerate_for_cpu(model, dtype="float32")
    ids = torch.randint(3, 99, (1, 40))  # rows enough that other providers are asked for
    if warm:
        model(ids)
    traced = torch.jit.trace(model, (ids,), strict=False)  # strict refuses outputs that are dictionaries
    for shape in ((1, 40), (1, 7), (3, 60)):
        ids = torch.randint(3, 99, shape)
        torch.testing.assert_close(traced(ids)["last_hidden_state"], model(ids).last_hidden_state)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_a_trace_of_each_kind_of_module_serves_other_sizes(name: str, dtype: str, warm: bool) -> None:
    build, calls = MODULES[name]
    torch.manual_seed(0)
    model = build().eval()
    inputs = [tuple(torch.randn(shape) for shape in shapes) for shapes in calls]
    fast = accelerate_for_cpu(copy.deepcopy(model), dtype=dtype)
    if warm:
        fast(*inputs[-1])
    traced = torch.jit.trace(fast, inputs[0], strict=False, check_trace=False)
    for one in (*inputs, *inputs):
        expected = _first(model(*one))
        allowed = (1e-4 if dtype == "float32" else 0.05) * float(expected.abs().max())
        torch.testing.assert_close(_first(traced(*one)), expected, atol=allowed, rtol=0)


# One of each kind of layer: encoders, decoders, experts, recorded layers, convolutions, two towers, sound.
TRACED = ("bert", "deberta-v2", "gpt2", "llama", "qwen3", "mixtral", "t5", "bart", "whisper", "mamba")
TRACED += ("resnet", "mobilenet-v2", "convnext", "swin", "segformer", "siglip-vision", "wav2vec2")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", TRACED)
@torch.no_grad()
def test_a_trace_of_a_model_serves_what_eagers_serves(name: str, warm: bool) -> None:
    family = FAMILIES[name]
    model = family.build()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # a trace returns tensors alone
    torch.manual_seed(1)
    calls = [family.inputs(2, 12), family.inputs(3, 20), family.inputs(1, 9)]
    plain = _outputs(_traced(model, calls[0]), calls)
    fast = accelerate_for_cpu(copy.deepcopy(model), dtype="float32")
    if warm:
        fast(**calls[1])
    ours = _outputs(_traced(fast, calls[0]), calls)
    for call, output, theirs in zip(calls, ours, plain, strict=True):
        if theirs is None:  # whose trace has the sizes of its example, too
            continue
        assert output is not None
        counts = call.get("attention_mask")
        if counts is not None and counts.shape == output.shape[:2]:  # padding has values of its own
            output, theirs = output[counts.bool()], theirs[counts.bool()]
        torch.testing.assert_close(output, theirs, atol=2e-3, rtol=1e-3)


def _traced(model: nn.Module, call: dict[str, Tensor]) -> Any:
    return torch.jit.trace(model, example_kwarg_inputs=call, strict=False, check_trace=False)


def _outputs(traced: Any, calls: list[dict[str, Tensor]]) -> list[Tensor | None]:
    outputs: list[Tensor | None] = []
    for call in calls:
        try:
            outputs.append(_first(traced(**call)))
        except RuntimeError:
            outputs.append(None)
    return outputs


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


@torch.no_grad()
def test_a_trace_of_convolutions_is_saved_and_loaded() -> None:
    model = accelerate_for_cpu(classifier().eval(), dtype="float32")
    image, other = torch.randn(2, 3, 32, 32), torch.randn(3, 3, 24, 40)
    saved = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, image, check_trace=False), saved)
    saved.seek(0)
    loaded = torch.jit.load(saved)
    torch.testing.assert_close(loaded(other), model(other), atol=1e-4, rtol=1e-4)


def test_what_is_collected_while_a_trace_runs_is_not_recorded() -> None:
    class Collects(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            cycle: list[Any] = [KeptValues([torch.ones(3)])]
            cycle.append(cycle)
            del cycle
            gc.collect()
            return input + 1

    graph = str(torch.jit.trace(Collects(), torch.ones(2), check_trace=False).graph)
    assert "drop_values" not in graph
