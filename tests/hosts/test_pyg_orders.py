"""Every layer class called twice on one graph, in every order of modes: no call depends on the one before."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.graph.cache import adjacencies
from tests.hosts.pyg_classes import CLASSES, EDGES, FEATURES, SOURCES, arguments_of

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")

MODES = list(product((torch.no_grad, torch.inference_mode, torch.enable_grad), (True, False)))


def call(conv: nn.Module, arguments: dict[str, Tensor], mode: tuple[type, bool]) -> list[Tensor]:
    """The output, and where gradients are recorded those of the parameters."""
    context, training = mode
    with context():
        output = conv.train(training)(**arguments)
        output = output[0] if isinstance(output, tuple) else output
        if not output.requires_grad:
            return [output]
        grads = torch.autograd.grad(output.sin().sum(), list(conv.parameters()), allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", CLASSES)
def test_every_order_of_two_modes(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    conv = CLASSES[name]()
    for module in conv.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.0  # training changes no statistics
    ours = accelerate_for_cpu(copy.deepcopy(conv).train(), dtype="float32")
    arguments = {"x": torch.randn(SOURCES, FEATURES, generator=generator), **arguments_of(name, generator)}
    edge_index = torch.randint(0, SOURCES, (2, EDGES), generator=generator)
    expected = {mode: call(conv, {**arguments, "edge_index": edge_index}, mode) for mode in MODES}
    for order in product(MODES, MODES):
        adjacencies.clear()
        graph = edge_index.clone()
        for mode in order:
            for result, truth in zip(
                call(ours, {**arguments, "edge_index": graph}, mode), expected[mode], strict=True
            ):
                torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-3)
