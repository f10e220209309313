import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from hf_cpu_accel.rewrite.core.activations import identify

KNOWN = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu", "quick_gelu": "quick_gelu",
    "tanh": "tanh", "relu2": "relu2", "relu6": "relu6", "hardswish": "hardswish", "linear": "none", "leaky_relu": "leaky_relu",
    "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_every_activation_of_transformers_is_told_apart(name):
    assert identify(ACT2FN[name]) == KNOWN.get(name)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functional.relu, "relu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (nn.SiLU(inplace=True), "silu"),
        (nn.LeakyReLU(0.1), "leaky_relu_tenth"),
        (nn.LeakyReLU(0.1001), None),
        (nn.PReLU(), None),
        (nn.Softmax(dim=-1), None),
        (nn.Linear(3, 3), None),
        (lambda x: x.sum(), None),
        (lambda x, y: x, None),
        (str, None),
    ],
)
def test_by_values_not_by_class(function, name):
    assert identify(function) == name
