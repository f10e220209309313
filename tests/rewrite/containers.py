"""Small containers for the tests of the rules, and checks that hold for any of them."""

import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error


class Wrapped(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args, **kwargs):
        return self.part(*args, **kwargs)


class Parts(nn.Module):
    """dense, norm, activation and dropout, put together by `compute`."""

    def __init__(self, compute, *, norm=None, activation=None, features=64):
        super().__init__()
        self.dense = nn.Linear(64, features)
        self.dropout = nn.Dropout(0.5)
        if norm is not None:
            self.norm = norm
        if activation is not None:
            self.act = activation
        self.compute = compute


class Unary(Parts):
    def forward(self, hidden_states):
        return self.compute(self, hidden_states)


class Binary(Parts):
    def forward(self, hidden_states, input_tensor):
        return self.compute(self, hidden_states, input_tensor)


class Optional(Parts):
    def forward(self, hidden_states, scale=1.0):
        return self.compute(self, hidden_states) * scale


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-5, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps
        self.offset = offset

    def forward(self, x):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * scaled


def counts_of(part, dtype="float32", **options):
    model = Wrapped(part).eval()
    return model, explain(accelerate_for_cpu(model, dtype=dtype, **options)).counts()


def agrees(part, *inputs, dtype="float32", bound=1e-5):
    """The structures found, after checking outputs before, during and after."""
    model = Wrapped(part).eval()
    with torch.no_grad():
        before = model(*inputs)
        counts = explain(accelerate_for_cpu(model, dtype=dtype)).counts()
        assert row_error(model(*inputs), before) <= bound
        assert torch.equal(restore(model)(*inputs), before)
    assert model.part is part
    return counts


X, R = torch.randn(3, 7, 64), torch.randn(3, 7, 64)

UNARY = {
    "linear + activation": {"compute": lambda m, x: m.act(m.dense(x)), "activation": nn.GELU()},
    "first token: linear + activation": {
        "compute": lambda m, x: m.act(m.dense(x[:, 0])),
        "activation": nn.Tanh(),
    },
    "linear + activation + norm": {
        "compute": lambda m, x: m.norm(m.act(m.dense(x))),
        "activation": nn.ReLU(),
        "norm": nn.LayerNorm(64),
    },
    "linear + norm": {"compute": lambda m, x: m.norm(m.dropout(m.dense(x))), "norm": RMSNorm(64)},
}
BINARY = {
    "linear + residual + norm": {
        "compute": lambda m, x, r: m.norm(m.dropout(m.dense(x)) + r),
        "norm": nn.LayerNorm(64, eps=1e-12),
    },
    "linear + residual": {"compute": lambda m, x, r: r + m.dropout(m.dense(x))},
    "linear + activation + residual": {
        "compute": lambda m, x, r: m.act(m.dense(x)) + r,
        "activation": nn.GELU("tanh"),
    },
}
