"""While a model is matched, calls from another thread return correct outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain
from tests.rewrite.convolution import residual_blocks, test_convnext_block
from tests.rewrite.convolution.convolution_blocks import with_statistics
from tests.rewrite.encoder.test_window_layer import swin
from tests.rewrite.encoder_families import dinov2
from tests.rewrite.linear import test_nested_ffn

ACCURACY = {"rtol": 1e-4, "atol": 1e-4}


class Spy(nn.Module):
    """An activation that has another thread call the whole model when the matching thread calls it.

    So another call happens in the middle of each forward of each part that is matched.
    """

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.function = function
        self.thread: int | None = None
        self.call: Callable[[], Tensor] = Tensor
        self.answers: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.thread == threading.get_ident():
            other = threading.Thread(target=self._ask)
            other.start()
            other.join()
        return self.function(x)

    def _ask(self) -> None:
        with torch.no_grad():
            self.answers.append(self.call())

    @contextmanager
    def asking(self, call: Callable[[], Tensor]) -> Iterator[list[Tensor]]:
        """Inside, this thread is the one that looks."""
        self.call, self.thread = call, threading.get_ident()
        yield self.answers
        self.thread = None

    def __deepcopy__(self, memo: object) -> Spy:
        return self


class SpiedNorm(nn.Module):
    """A batch norm with fixed statistics, whose parameters are tried in another dtype."""

    def __init__(self, spy: Spy) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(32) + 0.5), nn.Parameter(torch.randn(32))
        self.register_buffer("running_mean", torch.randn(32))
        self.spy = [spy]

    def forward(self, x: Tensor) -> Tensor:
        self.spy[0](x)
        shape = (1, -1, 1, 1)
        return (x - self.running_mean.view(shape)) * self.weight.view(shape) + self.bias.view(shape)


class Gate(test_nested_ffn.GateFirst):
    def __init__(self, spy: Spy) -> None:
        super().__init__()
        self.spy = [spy]

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.proj(x).chunk(2, dim=-1)
        return self.spy[0](gate) * value


def pixels(channels: int = 3, side: int = 32) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def gains(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = dinov2()
    for layer in model.encoder.layer:
        layer.mlp.activation = spy
    return model, lambda model: model(pixels())[0]


def windows(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = swin()
    for layer in model.encoder.layers:
        for block in layer.blocks:
            block.mlp.act = spy
    return model, lambda model: model(pixels(side=56))[0]


def decoder(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, intermediate_size=96)).eval()
    for layer in model.model.layers:
        layer.mlp.act_fn = spy
    return model, lambda model: model(torch.arange(14).view(2, 7)).logits


def residuals(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    blocks = [residual_blocks.Block(32, 32) for _ in range(2)]
    for block in blocks:
        block.activation = spy
    return residual_blocks.host(*blocks), lambda model: model["stage"](pixels(32, 9))


def convolution_block(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.Sequential(test_convnext_block.Block(gain=0.5, act=lambda: spy)).eval()
    return model, lambda model: model(pixels(32, 9))


def norms(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    layers = (nn.Conv2d(32, 32, 3, padding=1), SpiedNorm(spy), nn.Sigmoid())
    return with_statistics(nn.Sequential(nn.Sequential(*layers))), lambda model: model(pixels(32, 9))


def networks(spy: Spy) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = nn.ModuleDict({"ff": test_nested_ffn.Network(Gate(spy))}).eval()
    return model, lambda model: model["ff"](torch.ones(2, 5, 48))


MODELS = {
    "decoder layer": decoder,
    "nested ffn": networks,
    "encoder layer": gains,
    "window encoder layer": windows,
    "residual blocks": residuals,
    "convolution block": convolution_block,
    "batch norm, folded": norms,
}


@pytest.mark.parametrize("structure", MODELS)
@torch.no_grad()
def test_another_threads_calls_are_right_while_a_model_is_looked_at(structure: str) -> None:
    spy = Spy(nn.functional.silu) if structure == "decoder layer" else Spy()
    model, call = MODELS[structure](spy.eval())
    expected = call(model)
    with spy.asking(lambda: call(model)) as answers:
        accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts().get(structure)
    assert len(answers) > 2
    for answer in answers:
        torch.testing.assert_close(answer, expected, **ACCURACY)
