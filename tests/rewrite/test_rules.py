"""The module rules on small containers: what each takes, what it must not take, and what it computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite import ffn as ffn_rule
from hf_cpu_accel.rewrite import linear as linear_rule
from hf_cpu_accel.rewrite import linear_block
from hf_cpu_accel.rewrite.packed_linear import PackedLinear
from hf_cpu_accel.rewrite.verify import probe, row_error


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


class MeanNorm(nn.Module):
    def __init__(self, size, eps=1e-7):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size) + 0.5), nn.Parameter(torch.rand(size))
        self.epsilon = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return (
            self.weight * centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.epsilon)
            + self.bias
        )


def _counts(part, dtype="float32", **options):
    model = Wrapped(part).eval()
    return model, explain(accelerate_for_cpu(model, dtype=dtype, **options)).counts()


def _agrees(part, *inputs, dtype="float32", bound=1e-5):
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


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("structure", UNARY)
def test_unary_blocks(structure, dtype, bound):
    assert _agrees(Unary(**UNARY[structure]), X, dtype=dtype, bound=bound) == {structure: 1}


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("structure", BINARY)
def test_binary_blocks(structure, dtype, bound):
    assert _agrees(Binary(**BINARY[structure]), X, R, dtype=dtype, bound=bound) == {structure: 1}


def test_inputs_by_name():
    model = Wrapped(Binary(**BINARY["linear + residual + norm"])).eval()
    with torch.no_grad():
        expected = model(X, R)
        accelerate_for_cpu(model, dtype="float32")
        for output in (model(X, input_tensor=R), model(input_tensor=R, hidden_states=X)):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(KeyError):
            model(X, residual=R)


def test_activation_held_as_a_function():
    part = Unary(lambda m, x: m.function(m.dense(x)))
    part.function = functional.silu
    assert _agrees(part, X) == {"linear + activation": 1}


@pytest.mark.parametrize(
    "part",
    [
        Unary(lambda m, x: 2 * m.act(m.dense(x)), activation=nn.GELU()),
        Unary(lambda m, x: m.dense(m.act(x)), activation=nn.GELU()),
        Unary(lambda m, x: m.act(m.dense(x))[:, 1], activation=nn.GELU()),
        Unary(lambda m, x: m.act(m.dense(x)), activation=nn.PReLU()),
        Binary(lambda m, x, r: m.norm(m.dense(x)) + r, norm=nn.LayerNorm(64)),
        Binary(lambda m, x, r: m.dense(x), norm=None),
        Optional(lambda m, x: m.act(m.dense(x)), activation=nn.GELU()),
    ],
    ids=["scaled", "before", "second token", "prelu", "post-norm", "residual ignored", "optional input"],
)
def test_what_only_looks_like_a_block_keeps_its_forward(part):
    inputs = (X, R) if isinstance(part, Binary) else (X,)
    assert _agrees(part, *inputs) == {"linear": 1}


def test_a_block_with_weights_of_its_own_is_not_one():
    part = Unary(lambda m, x: m.act(m.dense(x)) + m.extra, activation=nn.GELU())
    part.extra = nn.Parameter(torch.zeros(64))
    assert _agrees(part, X) == {"linear": 1}


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Identity()])
def test_feed_forward(activation, dtype, bound):
    part = nn.Sequential(nn.Linear(64, 100), activation, nn.Dropout(0.1), nn.Linear(100, 40, bias=False))
    assert _agrees(part, X, dtype=dtype, bound=bound) == {"ffn": 2}


def test_feed_forward_keeps_paths_and_indexing():
    part = nn.Sequential(nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 64))
    model, _ = _counts(part)
    assert list(model.state_dict()) == ["part.0.weight", "part.0.bias", "part.2.weight", "part.2.bias"]
    assert len(model.part) == 3
    assert isinstance(model.part[0], PackedLinear)
    with torch.no_grad():
        output = X
        for step in model.part:
            output = step(output)
        torch.testing.assert_close(model(X), output, rtol=1e-4, atol=1e-5)


def test_feed_forward_in_the_other_order_of_registration():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(128, 64), nn.Linear(64, 128)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    assert _agrees(Reversed(), X) == {"ffn": 2}


@pytest.mark.parametrize(
    ("norm", "counts"),
    [
        (RMSNorm(64), {"rms norm": 1}),
        (RMSNorm(64, eps=1e-12), {"rms norm": 1}),
        (MeanNorm(64), {"layer norm": 1}),
        (RMSNorm(64, offset=1.0), {}),
        (nn.LayerNorm(64), {}),
        (nn.BatchNorm1d(7), {}),
    ],
    ids=["rms", "rms small eps", "layer norm", "gemma", "torch", "batch norm"],
)
def test_norms(norm, counts):
    assert _agrees(norm, X) == counts
    assert _agrees(norm, X * 1e-4) == counts


def test_merged_projections_pack_side_by_side():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.ragged, self.k = nn.Linear(64, 64), nn.Linear(64, 20), nn.Linear(64, 32, bias=False)
            self.o = nn.Linear(32, 64)
            self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

        def forward(self, x):
            return self.o(self.k(x)) + self.q(x), self.ragged(x), [expert(x) for expert in self.experts]

    model, counts = _counts(Attention())
    assert counts == {"merged projections": 3, "linear": 3}
    part = model.part
    assert part.q.group is part.k.group is part.ragged.group
    assert (part.q.range, part.k.range, part.ragged.range) == ((0, 64), (64, 96), (96, 116))
    assert part.o.group is not part.q.group


class Subclass(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def _hooked():
    linear = nn.Linear(64, 64)
    linear.register_forward_hook(lambda module, args, output: output + 1)
    return linear


def _overridden():
    linear = nn.Linear(64, 64)
    linear.forward = lambda input: input
    return linear


REFUSED = {
    "Subclass is not a plain nn.Linear": Subclass(64, 64),
    "hooks, parametrizations": _hooked(),
    "a forward of its own": _overridden(),
    "is not a plain nn.Linear": parametrizations.weight_norm(nn.Linear(64, 64)),
    "only 2 output features": nn.Linear(64, 2),
    "weights in torch.float16 are not supported": nn.Linear(64, 64).half(),
    "weights in torch.float64 are not supported": nn.Linear(64, 64).double(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_linears_that_are_left_say_why(reason):
    model, counts = _counts(REFUSED[reason])
    assert counts == {}
    assert model.part is REFUSED[reason]
    assert [item.name for item in explain(model).left if reason in item.reason] == ["part"]


def test_the_target_itself_cannot_be_swapped():
    model = nn.Linear(64, 64).eval()
    plan = explain(accelerate_for_cpu(model, dtype="float32"))
    assert plan.counts() == {}
    assert "it is the target itself" in plan.left[0].reason


def test_skip_modules_takes_all_below():
    part = nn.ModuleDict(
        {"mlp": nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "out": nn.Linear(64, 64)}
    )
    model, counts = _counts(part, skip_modules=("*.mlp",))
    assert counts == {"linear": 1}
    assert {item.name for item in explain(model).left if item.reason == "skip_modules"} == {
        "part.mlp.0",
        "part.mlp.2",
    }
    accelerate_for_cpu(model, dtype="float32", skip_modules=["part.mlp.2", "part.out"])
    assert explain(model).counts() == {"linear": 1}
    assert isinstance(model.part["mlp"][0], PackedLinear)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"skip_modules: 'pooler' matches no module of Wrapped"):
        accelerate_for_cpu(Wrapped(nn.Linear(64, 64)).eval(), skip_modules=("pooler",))


def test_one_module_in_two_places_is_replaced_in_both():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": shared}), "b": nn.ModuleDict({"y": shared})}).eval()
    plan = explain(accelerate_for_cpu(model, dtype="float32"))
    assert plan.counts() == {"linear": 1}
    assert isinstance(model["a"]["x"], PackedLinear)
    assert model["a"]["x"] is model["b"]["y"]
    restore(model)
    assert model["a"]["x"] is model["b"]["y"] is shared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tied_weights_stay_tied(dtype):
    model = nn.ModuleDict({"embed": nn.Embedding(40, 64), "head": nn.Linear(64, 40)}).eval()
    model["head"].weight = model["embed"].weight
    weight, values, before = model["embed"].weight, model["embed"].weight.clone(), model["head"](X)
    plan = explain(accelerate_for_cpu(model, dtype=dtype))
    if dtype == "float32":
        assert plan.counts() == {}
        assert "shares its weight with embed.weight" in next(i.reason for i in plan.left if i.name == "head")
    else:
        assert plan.counts() == {"linear": 1}
        assert isinstance(model["head"], PackedLinear)
        assert model["head"].weight is weight
    assert torch.equal(model["embed"].weight, values)
    assert list(model.state_dict()) == ["embed.weight", "head.weight", "head.bias"]
    restore(model)
    assert model["head"].weight is model["embed"].weight is weight
    assert torch.equal(model["head"](X), before)


def _corrupt(monkeypatch, module):
    """Packing goes wrong: the replacement computes something else."""
    pack = module.pack

    def wrong(linears, dtype, **options):
        packed = pack(linears, dtype, **options)
        packed[0].group.packed.data[0] += 1
        return packed

    monkeypatch.setattr(module, "pack", wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_replacement_that_disagrees_is_not_put_in_place(monkeypatch, dtype):
    part = nn.ModuleDict({
        "block": Unary(**UNARY["linear + activation"]), "alone": nn.Linear(64, 64),
        "ffn": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
    })  # fmt: skip
    modules = list(part.modules())
    for module in (linear_rule, linear_block, ffn_rule):
        _corrupt(monkeypatch, module)
    model, counts = _counts(part, dtype=dtype)
    assert counts == {}
    assert list(model.part.modules()) == modules
    reasons = {item.name: item.reason for item in explain(model).left}
    assert "its replacement differs by" in reasons["part.block"]
    assert "its replacement differs by" in reasons["part.alone"]
    assert "its replacement differs by" in reasons["part.ffn"]


def test_verification_can_be_turned_off(monkeypatch):
    _corrupt(monkeypatch, linear_rule)
    _, counts = _counts(nn.Linear(64, 64), verify=False)
    assert counts == {"linear": 1}


def test_row_error_sees_scale_single_rows_and_nan():
    reference = probe(64, torch.float32)
    assert row_error(reference.clone(), reference) == 0
    assert row_error(reference * 1.01, reference) == pytest.approx(0.01, rel=1e-3)
    one_row = reference.clone()
    one_row[1, 2] *= -1
    assert row_error(one_row, reference) == pytest.approx(2)
    one_row[1, 2, 0] = torch.nan
    assert row_error(one_row, reference) == float("inf")
    assert row_error(reference[:1], reference) == float("inf")


def test_transformer_encoder_layer_of_torch_keeps_its_own_fused_path():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        expected = model(X)
        accelerate_for_cpu(model, dtype="float32")
        assert explain(model).counts() == {"linear": 1}
        reasons = {item.name: item.reason for item in explain(model).left}
        assert "torch's own fused encoder layer" in reasons["0.layers.1.linear2"]
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(restore(model)(X), expected)
