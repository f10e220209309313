"""A replacement with another result is not used."""

import pytest
from torch import nn

from hf_cpu_accel import explain
from hf_cpu_accel.rewrite.linear import ffn as ffn_rule
from hf_cpu_accel.rewrite.linear import linear_block
from hf_cpu_accel.rewrite.linear import match as linear_rule
from tests.rewrite.containers import UNARY, Unary, counts_of


def _corrupt(monkeypatch, module):
    """Packing goes wrong: the replacement computes something else."""
    pack = module.pack

    def wrong(linears, dtype, **options):
        packed = pack(linears, dtype, **options)
        packed[0].group.packed.data[0] += 1
        return packed

    monkeypatch.setattr(module, "pack", wrong)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int8-weight", "int4"])
def test_a_replacement_that_disagrees_is_not_put_in_place(monkeypatch, dtype):
    part = nn.ModuleDict({
        "block": Unary(**UNARY["linear + activation"]), "alone": nn.Linear(64, 64),
        "ffn": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
    })  # fmt: skip
    modules = list(part.modules())
    for module in (linear_rule, linear_block, ffn_rule):
        _corrupt(monkeypatch, module)
    model, counts = counts_of(part, dtype=dtype)
    assert counts == {}
    assert list(model.part.modules()) == modules
    reasons = {item.name: item.reason for item in explain(model).left}
    assert "its replacement differs by" in reasons["part.block"]
    assert "its replacement differs by" in reasons["part.alone"]
    assert "its replacement differs by" in reasons["part.ffn"]


def test_verification_can_be_turned_off(monkeypatch):
    _corrupt(monkeypatch, linear_rule)
    _, counts = counts_of(nn.Linear(64, 64), verify=False)
    assert counts == {"linear": 1}
