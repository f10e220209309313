"""Linears: which are packed, merged or left, and the reasons."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.shared import STRUCTURE as SHARED
from hf_cpu_accel.rewrite.linear.shared import SharedLinear
from tests.rewrite.containers import Wrapped, X, counts_of


def test_merged_projections_pack_side_by_side():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.ragged, self.k = nn.Linear(64, 64), nn.Linear(64, 20), nn.Linear(64, 32, bias=False)
            self.o = nn.Linear(32, 64)
            self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

        def forward(self, x):
            return self.o(self.k(x)) + self.q(x), self.ragged(x), [expert(x) for expert in self.experts]

    model, counts = counts_of(Attention())
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
    "a replaced forward": _overridden(),
    "is not a plain nn.Linear": parametrizations.weight_norm(nn.Linear(64, 64)),
    "only 2 output features": nn.Linear(64, 2),
    "only 256 weights": nn.Linear(16, 16),
    "weights in torch.float64 are not supported": nn.Linear(64, 64).double(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_linears_that_are_left_say_why(reason):
    model, counts = counts_of(REFUSED[reason])
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
    model, counts = counts_of(part, skip_modules=("*.mlp",))
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_tied_weights_stay_tied(dtype):
    model = nn.ModuleDict({"embed": nn.Embedding(40, 64), "head": nn.Linear(64, 40)}).eval()
    model["head"].weight = model["embed"].weight
    weight, values, before = model["embed"].weight, model["embed"].weight.clone(), model["head"](X)
    plan = explain(accelerate_for_cpu(model, dtype=dtype))
    if dtype == "float32":
        assert plan.counts() == {SHARED: 1}
        assert isinstance(model["head"], SharedLinear)
    else:
        assert plan.counts() == {"linear": 1}
        assert isinstance(model["head"], PackedLinear)
        assert model["head"].weight is weight
    assert torch.equal(model["embed"].weight, values)
    assert list(model.state_dict()) == ["embed.weight", "head.weight", "head.bias"]
    restore(model)
    assert model["head"].weight is model["embed"].weight is weight
    assert torch.equal(model["head"](X), before)


def test_an_encoder_layer_of_torch_whose_attention_is_left_keeps_its_own_fused_path():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 64)).eval()
    with torch.no_grad():
        expected = model(X)
        accelerate_for_cpu(model, dtype="float32", skip_modules=["*.self_attn"])
        assert explain(model).counts() == {"linear": 1}
        reasons = {item.name: item.reason for item in explain(model).left}
        assert "PyTorch's fused encoder layer" in reasons["0.layers.1.linear2"]
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(restore(model)(X), expected)
