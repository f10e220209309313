"""First and second derivatives of every layer class, whatever is frozen: those of PyTorch Geometric in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hf_cpu_accel import accelerate_for_cpu
from tests.hosts.pyg_classes import CLASSES, EDGES, FEATURES, SOURCES, TARGETS, arguments_of

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")

FLOWS = ("source_to_target", "target_to_source")
FROZEN = 2
"""At most so many of a layer's inputs and parameters are frozen at once, in every combination."""


class Case:
    """A layer with a graph. Its leaves are the features of nodes and edges and the layer's parameters, by name."""

    def __init__(self, conv: nn.Module, edge_index: Tensor, inputs: Mapping[str, Tensor]) -> None:
        self.conv, self.edge_index = conv, edge_index
        self.inputs = dict(inputs)

    def to_double(self) -> Case:
        inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in self.inputs.items()
        }
        return Case(copy.deepcopy(self.conv).double(), self.edge_index, inputs)

    def leaves(self) -> dict[str, Tensor]:
        features = {name: value for name, value in self.inputs.items() if value.is_floating_point()}
        return {**features, **dict(self.conv.named_parameters())}

    def output(self) -> Tensor:
        arguments = dict(self.inputs)
        source, target = arguments.pop("x"), arguments.pop("target", None)
        x = source if target is None else (source, target)
        output = self.conv(x, edge_index=self.edge_index, **arguments)
        return output[0] if isinstance(output, tuple) else output

    def derivatives(self, frozen: tuple[str, ...], of: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of an energy for each leaf but the frozen ones, and those of the squared gradient for `of`."""
        leaves = self.leaves()
        for name, leaf in leaves.items():
            leaf.requires_grad_(name not in frozen)
        energy = self.output().tanh().sum()
        first = self._gradients(energy, leaves, frozen, create_graph=True)
        penalty = first[of].square().sum() if of in first else torch.zeros(())
        return first, self._gradients(penalty, leaves, frozen)

    @staticmethod
    def _gradients(
        output: Tensor, leaves: Mapping[str, Tensor], frozen: tuple[str, ...], create_graph: bool = False
    ) -> dict[str, Tensor]:
        if not output.requires_grad:
            return {}
        names = [name for name in leaves if name not in frozen]
        grads = torch.autograd.grad(
            output, [leaves[name] for name in names], create_graph=create_graph, allow_unused=True
        )
        return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def close(
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], frozen: tuple[str, ...], order: str
) -> None:
    for name, truth in expected.items():
        truth = truth.detach()
        if name in frozen:
            assert name not in ours
            continue
        largest = float(truth.abs().max())
        grad = ours.get(name, torch.zeros_like(truth)).detach()
        error = float((grad.double() - truth).abs().max())
        assert error <= 1e-3 * largest + 1e-5, (
            f"{order} derivative for {name}, frozen {frozen}: {error} of {largest}"
        )


def case_of(name: str, flow: str, pair: bool) -> Case:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {"x": torch.randn(SOURCES, FEATURES, generator=generator)}
    if pair:
        inputs["target"] = torch.randn(TARGETS, FEATURES, generator=generator)
    inputs.update(arguments_of(name, generator))
    edge_index = torch.randint(0, SOURCES - 3, (2, EDGES), generator=generator)
    return Case(CLASSES[name](flow=flow).train(), edge_index, inputs)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "pair"])
def test_derivatives(name: str, flow: str, pair: bool) -> None:
    stock = case_of(name, flow, pair)
    truth = stock.to_double()
    try:
        truth.output()
    except (AssertionError, AttributeError, TypeError, ValueError):
        assert pair, "every layer takes one tensor"
        return  # not every layer takes a pair
    leaves = list(truth.leaves())
    expected = {of: truth.derivatives((), of) for of in leaves[: FROZEN + 1]}
    accelerate_for_cpu(stock.conv, dtype="float32")
    for count in range(min(FROZEN, len(leaves) - 1) + 1):
        for frozen in combinations(leaves, count):
            of = next(leaf for leaf in leaves if leaf not in frozen)
            first, second = stock.derivatives(frozen, of)
            close(first, expected[of][0], frozen, "first")
            close(second, expected[of][1], frozen, "second")


def _flat(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([torch.ones(1), *(grad.flatten() for grad in grads.values())])


@pytest.mark.parametrize("name", CLASSES)
def test_forward_mode_and_transforms(name: str) -> None:
    """Layers compute these by their own code."""
    case = case_of(name, FLOWS[0], pair=False)
    x, tangent = case.inputs["x"], torch.randn(SOURCES, FEATURES)

    def output(x: Tensor) -> Tensor:
        return Case.output(Case(case.conv, case.edge_index, {**case.inputs, "x": x}))

    parameters = {name: parameter.detach() for name, parameter in case.conv.named_parameters()}

    def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
        arguments = {**case.inputs, "edge_index": case.edge_index}
        result = torch.func.functional_call(case.conv, parameters, kwargs=arguments, tie_weights=False)
        return (result[0] if isinstance(result, tuple) else result).sin().sum()

    def forward_mode() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(output(forward_ad.make_dual(x, tangent))).tangent

    calls = {
        "forward_ad": forward_mode,
        "jvp": lambda: torch.func.jvp(output, (x,), (tangent,))[1],
        "grad": lambda: torch.func.grad(lambda x: output(x).sin().sum())(x),
        "vmap": lambda: torch.func.vmap(output)(torch.stack([x, x + tangent])),
        "functional_call": lambda: _flat(torch.func.grad(of_parameters)(parameters)),
    }

    def results() -> dict[str, Tensor | str]:
        found: dict[str, Tensor | str] = {}
        for kind, call in calls.items():
            try:
                found[kind] = call().detach()
            except (NotImplementedError, RuntimeError, ValueError) as error:  # of the layer's own ops
                found[kind] = type(error).__name__
        return found

    expected = results()
    accelerate_for_cpu(case.conv, dtype="float32")
    for kind, result in results().items():
        truth = expected[kind]
        if isinstance(truth, str):
            assert result == truth, kind
        else:
            torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-4)
            assert truth.any()
