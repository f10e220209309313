"""A replacement with another result is not used."""

import pytest
import torch
from torch import nn

from hf_cpu_accel import explain
from hf_cpu_accel.rewrite.core.verify import computes_alike, probe, row_error, surely_within
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


def test_single_rows_may_be_quantized_otherwise_and_no_more():
    reference = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    rows = {count: reference.clone() for count in (0, 3, 6)}
    for count, moved in rows.items():
        moved[:count] *= 1.003
    alike = {
        (count, quantizes): computes_alike(moved, reference, 2e-3, quantizes=quantizes)
        for count, moved in rows.items()
        for quantizes in (True, False)
    }
    assert [key for key, holds in alike.items() if holds] == [(0, True), (0, False), (3, True)]
    rows[3][0] *= 1.02
    assert not computes_alike(rows[3], reference, 2e-3, quantizes=True)
    assert not computes_alike(reference[:3], reference, 2e-3, quantizes=True)
    rows[0][5, 5] = torch.nan
    assert not computes_alike(rows[0], reference, 2e-3, quantizes=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_surely_within_are_within(dtype):
    reference = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert surely_within(reference, reference, 1e-4)
    one_row = reference.clone()
    one_row[1, 2] *= 1.25
    assert [surely_within(one_row, reference, allowed) for allowed in (0.2, 0.3)] == [False, True]
    counted = torch.ones(2, 20, dtype=torch.bool)
    assert not surely_within(one_row, reference, 0.2, rows=counted)
    counted[1, 2] = False
    assert surely_within(one_row, reference, 0.2, rows=counted)
    # A row that is nearly 0 is measured against the largest one.
    reference[0, 0] = 0
    assert not surely_within(reference + 0.01, reference, 1e-3)
    assert surely_within(reference, reference, 1e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20, 1e-30])
def test_numbers_beyond_float32_are_left_to_row_errors(value):
    reference = torch.ones(3, 64)
    assert not surely_within(torch.full((3, 64), value), reference, 1e-4)
    assert not surely_within(reference * value, reference * value, 1e-4)
