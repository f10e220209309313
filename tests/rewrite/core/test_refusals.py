"""The plan has reasons where a fusion could be expected, and errors of this package are not taken for such."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.rewrite.convolution import convnext_block, residual_block
from hf_cpu_accel.rewrite.core.foreign_code import STRICT, OwnError, attempt, call_foreign, ours
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused
from hf_cpu_accel.rewrite.encoder import fuse as encoder_fuse
from hf_cpu_accel.rewrite.encoder import match as encoder_match
from hf_cpu_accel.rewrite.encoder import window_fuse
from hf_cpu_accel.rewrite.linear import nested_ffn
from tests.rewrite.convolution import test_convnext_block, test_residual_block
from tests.rewrite.encoder_families import bert, inputs, run
from tests.rewrite.linear import test_nested_ffn

pytestmark = pytest.mark.usefixtures(
    "nothing_is_recorded"
)  # else the steps of layers run that the others refuse


def reasons(model: nn.Module, structure: str) -> dict[str, str | None]:
    return {item.name: item.reason for item in explain(model).left if item.structure == structure}


def broken(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("planted")


def test_whatever_foreign_code_raises_is_a_refusal_that_names_it() -> None:
    def forward(x: Tensor) -> Tensor:
        raise ValueError("three heads\nor four")

    assert call_foreign(len, "four") == 4
    refusal = call_foreign(forward, torch.ones(1))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("forward raised ValueError: three heads")
    assert call_foreign(nn.Linear(2, 2), "text").reason.startswith("Linear raised TypeError")
    assert call_foreign(nn.Linear(2, 2).forward, "text").reason.startswith("Linear raised TypeError")


def test_errors_of_our_own_beneath_foreign_code_go_through_it() -> None:
    def theirs() -> None:
        try:
            with ours():
                raise IndexError("planted")
        except Exception:  # what hosts do
            return

    with pytest.raises(OwnError):
        call_foreign(theirs)
    with pytest.raises(IndexError, match="planted"):
        attempt("layers.0", theirs)


def test_no_memory_is_no_refusal() -> None:
    def greedy() -> None:
        raise MemoryError

    for caller in (call_foreign, lambda function: attempt("layers.0", function)):
        with pytest.raises(MemoryError):
            caller(greedy)


def test_a_reading_ends_with_the_refusal_that_it_raises() -> None:
    def look() -> int:
        raise Refused(Refusal("no norms"))

    assert attempt("layers.0", look) == Refusal("no norms")


def swin() -> nn.Module:
    sizes = {"image_size": 28, "patch_size": 2, "embed_dim": 32, "num_heads": [2], "window_size": 7}
    return tf.SwinModel(tf.SwinConfig(depths=[2], **sizes)).eval()


def networks(first: type[nn.Module] = test_nested_ffn.GateFirst) -> nn.Module:
    return nn.ModuleDict({"ff": test_nested_ffn.Network(first())}).eval()


def residual_blocks() -> nn.Module:
    blocks = (test_residual_block.Block(32, 32) for _ in range(2))
    return test_residual_block.host(*blocks, nn.Sigmoid())


class Behind(nn.Module):
    """Something comes after its convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * x.mean()


class Between(Behind):
    """Something comes between its convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * x.mean())


def convolutions(block: type[nn.Module]) -> nn.Module:
    return nn.ModuleDict({"stage": nn.Sequential(block(), block())}).eval()


def convnext_blocks(block: type[nn.Module] = test_convnext_block.Block) -> nn.Module:
    return nn.ModuleDict({"stage": nn.Sequential(block(gain=0.7))}).eval()


def called(model: nn.Module) -> Tensor:
    """Return the output of the model, or of its single part, for a batch."""
    torch.manual_seed(0)
    with torch.no_grad():
        if isinstance(model, tf.BertModel):
            return run(model, inputs(model))
        if isinstance(model, tf.SwinModel):
            return model(torch.randn(2, 3, 28, 28))[0]
        (part,) = model.children()
        return part(torch.randn(2, 5, 48) if "ff" in model else torch.randn(2, 32, 9, 8))


# An error of our own, planted in each fuser: where, and the model that meets it.
PLANTED = {
    "encoder layer": (encoder_match, "candidates", bert),
    "window encoder layer": (window_fuse, "candidates", swin),
    "nested ffn": (nested_ffn, "_gate", networks),
    "residual blocks": (residual_block, "_agree", residual_blocks),
    "convolution block": (convnext_block, "_disagreement", convnext_blocks),
}


@pytest.mark.parametrize("structure", PLANTED)
def test_an_error_of_ours_raises_under_strict(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, build = PLANTED[structure]
    monkeypatch.setattr(module, name, broken)
    model = build()
    before = called(model)
    with pytest.raises(KeyError, match="planted"):
        accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(called(model), before)


@pytest.mark.parametrize("structure", PLANTED)
def test_else_it_is_logged_and_the_part_left(
    structure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name, build = PLANTED[structure]
    monkeypatch.setattr(module, name, broken)
    monkeypatch.delenv(STRICT)
    model = build()
    before = called(model)
    with caplog.at_level(logging.WARNING, "hf_cpu_accel"):
        accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(called(model), before, rtol=1e-4, atol=1e-5)
    left = reasons(model, structure)
    assert left
    assert set(left.values()) == {"hf_cpu_accel raised KeyError; see the log"}
    logged = [record.getMessage() for record in caplog.records]
    assert all(sum(f"'{path}'" in message for message in logged) == 1 for path in left)
    assert not [item for item in explain(model).replaced if item.structure == structure]


@pytest.mark.parametrize(
    ("model", "structure", "path", "reason"),
    [
        (
            networks(test_nested_ffn.Added),
            "nested ffn",
            "ff",
            "does not apply a gate with a supported activation",
        ),
        (
            convolutions(Behind),
            "residual blocks",
            "stage.0",
            "follows its last convolution",
        ),
        (
            convolutions(Between),
            "residual blocks",
            "stage.1",
            "operations other than convolutions",
        ),
        (
            convnext_blocks(test_convnext_block.WithoutResidual),
            "convolution block",
            "stage.0",
            "computes a different result",
        ),
    ],
    ids=["ffn", "behind convolutions", "between convolutions", "convolution block"],
)
def test_other_parts_say_why_they_are_left(model: nn.Module, structure: str, path: str, reason: str) -> None:
    accelerate_for_cpu(model, dtype="float32")
    assert reason in str(reasons(model, structure)[path])


def test_a_window_layer_says_why_it_is_left() -> None:
    class Doubled(type(swin().encoder.layers[0].blocks[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, input_dimensions: Any, *args: Any) -> Any:
            return super().forward(hidden_states, input_dimensions, *args) * 2

    model = swin()
    model.encoder.layers[0].blocks[1].__class__ = Doubled
    accelerate_for_cpu(model, dtype="float32")
    left = reasons(model, window_fuse.STRUCTURE)
    assert list(left) == ["encoder.layers.0.blocks.1"]
    assert "it returns more than hidden states" in str(left)


def refusing(model: nn.Module, obstacle: str) -> nn.Module:
    """Return a model with one layer that cannot be fused."""
    layer = model.encoder.layer[1]
    if obstacle == "parameter":
        layer.intermediate.register_parameter("temperature", nn.Parameter(torch.ones(64, 64)))
    elif obstacle == "hook":
        layer.attention.self.register_forward_hook(lambda module, args, output: None)
    elif obstacle == "forward":
        own = layer.attention.forward
        layer.attention.forward = lambda *args, **kwargs: own(*args, **kwargs)
    elif obstacle == "buffer":
        layer.register_buffer("steps", torch.zeros(1))
    return model


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("parameter", "temperature belongs to neither a linear nor a norm"),
        ("hook", "modules in it have hooks"),
        ("forward", "is replaced or compiled"),
        ("buffer", "it has buffers"),
    ],
)
def test_an_encoder_layer_says_why_it_is_left(obstacle: str, reason: str) -> None:
    model = accelerate_for_cpu(refusing(bert(), obstacle), dtype="float32")
    left = reasons(model, encoder_fuse.STRUCTURE)
    assert list(left) == ["encoder.layer.1"]
    assert reason in str(left["encoder.layer.1"])


def test_a_layer_that_raises_says_what() -> None:
    class Picky(type(bert().encoder.layer[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.shape[0] == 2:
                raise ValueError("an even batch")
            return super().forward(hidden_states, *args, **kwargs)

    model = bert()
    model.encoder.layer[0].__class__ = Picky
    accelerate_for_cpu(model, dtype="float32")
    assert reasons(model, encoder_fuse.STRUCTURE) == {
        "encoder.layer.0": "Picky raised ValueError: an even batch"
    }
    assert "an even batch" in str(explain(model))


def test_what_is_fused_gives_no_such_row() -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    assert not reasons(model, encoder_fuse.STRUCTURE)
