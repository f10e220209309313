"""Each layer of PyTorch Geometric: the same outputs and gradients as without us, and nothing of it left after `restore`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.graph import propagate
from tests.hosts.pyg_layers import ATTRIBUTES, EDGES, FEATURES, LAYERS, mlp, served

pytestmark = pytest.mark.usefixtures("small_graphs_are_served")


def run(conv: nn.Module, x: Tensor, edge_index: Tensor, **arguments: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the parameters."""
    x = x.clone().requires_grad_()
    output = conv(x, edge_index, **arguments)
    torch.manual_seed(1)
    leaves = [x, *(parameter for parameter in conv.parameters() if parameter.requires_grad)]
    grads = torch.autograd.grad((output * torch.randn_like(output)).sum(), leaves, allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name: str, x: Tensor, edge_index: Tensor) -> None:
    make, arguments = LAYERS[name]
    conv = make()
    expected = run(conv, x, edge_index, **arguments)
    accelerate_for_cpu(conv, dtype="float32")
    assert explain(conv).replaced
    for ours, theirs in zip(run(conv, x, edge_index, **arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (served(conv) > 0) == (name != "arma")  # its nodes are not the first dimension
    restore(conv)
    assert "propagate" not in vars(conv)
    assert "forward" not in vars(conv)
    conv.eval()
    with torch.no_grad():
        stock, drawn = conv(x, edge_index, **arguments), torch.get_rng_state()
        accelerate_for_cpu(conv, dtype="float32")
        torch.testing.assert_close(conv(x, edge_index, **arguments), stock, rtol=1e-4, atol=1e-4)
        assert torch.equal(torch.get_rng_state(), drawn)  # that others go on drawing
        restore(conv)
        assert torch.equal(conv(x, edge_index, **arguments), stock)


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name.split()[0] in ("gat", "gatv2", "transformer")]
)
@torch.no_grad()
def test_attention_weights_come_besides(name: str, x: Tensor, edge_index: Tensor) -> None:
    make, arguments = LAYERS[name]
    conv = make().eval()
    _, (all_edges, expected) = conv(x, edge_index, **arguments, return_attention_weights=True)
    accelerate_for_cpu(conv, dtype="float32")
    output, (edges, weights) = conv(x, edge_index, **arguments, return_attention_weights=True)
    assert torch.equal(edges, all_edges)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(output, conv(x, edge_index, **arguments))
    assert served(conv) == 2


def test_small_graphs_are_left_to_the_layer(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(propagate, "FEWEST_VALUES", EDGES * FEATURES + 1)
    conv = pyg.GINEConv(mlp(FEATURES, 12), edge_dim=5)
    expected = conv(x, edge_index, **ATTRIBUTES)
    assert torch.equal(accelerate_for_cpu(conv)(x, edge_index, **ATTRIBUTES), expected)
    assert served(conv) == 0


def test_dropout_of_attention(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.GATConv(FEATURES, 8, heads=2, dropout=0.5))
    torch.manual_seed(0)
    first = conv(x, edge_index)
    assert not torch.equal(first, conv(x, edge_index))
    outputs = torch.stack([conv(x, edge_index).detach() for _ in range(400)])
    torch.testing.assert_close(
        outputs.mean(0), restore(conv.eval())(x, edge_index).detach(), rtol=0.3, atol=0.3
    )


def test_bfloat16_double_and_no_edges(x: Tensor, edge_index: Tensor) -> None:
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float64, 1e-10)):
        conv = pyg.GraphConv(FEATURES, 10).to(dtype)
        expected = conv(x.to(dtype), edge_index)
        output = accelerate_for_cpu(conv, dtype="float32")(x.to(dtype), edge_index)
        assert output.dtype is dtype
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    none = torch.zeros(2, 0, dtype=torch.long)
    for conv in (pyg.GCNConv(FEATURES, 4), pyg.GATConv(FEATURES, 4), pyg.SAGEConv(FEATURES, 4)):
        expected = conv(x, none)
        torch.testing.assert_close(accelerate_for_cpu(conv)(x, none), expected, rtol=1e-4, atol=1e-4)


def test_networks_that_are_taken_apart_are_not_packed() -> None:
    conv = accelerate_for_cpu(pyg.EdgeConv(mlp(2 * FEATURES, 20)).eval(), dtype="float32")
    assert type(conv.nn) is nn.Sequential
    assert type(conv.nn[0]) is nn.Linear


class Scaled(pyg.MessagePassing):
    """Its messages are x_j while the factor is 1: only watching tells it from one that copies."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.factor


def test_messages_that_only_look_like_rows(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(Scaled())
    assert explain(conv).replaced[0].structure == "custom messages, mean"
    with torch.no_grad():
        conv.factor.fill_(3.0)
        expected = restore(copy.deepcopy(conv))(x, edge_index)
        torch.testing.assert_close(conv(x, edge_index), expected, rtol=1e-4, atol=1e-4)


def test_hooks_and_explanations_go_to_the_layer(x: Tensor, edge_index: Tensor) -> None:
    conv = accelerate_for_cpu(pyg.SAGEConv(FEATURES, 10))
    seen = []
    handle = conv.register_message_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    conv(x, edge_index)
    assert seen == [(EDGES, FEATURES)]
    handle.remove()
    conv(x, edge_index)
    assert len(seen) == 1
    assert vars(conv)["propagate"].served == 1
