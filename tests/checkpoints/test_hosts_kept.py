"""What becomes of the tensors of a linear that a host has quantized, and is packed: freed, given back, saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.checkpoints.stored import in_floats
from hf_cpu_accel.checkpoints.stored_weight import plain_tensors
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.patching.restore import FreedWeight
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.saved import original_state
from tests.checkpoints.host_linears import COLUMNS, EXACT, Projections, be_hosts, outputs
from tests.checkpoints.stand_ins import Linear8bitLt


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    be_hosts(monkeypatch)


def test_the_integers_are_freed_and_share_their_memory_again() -> None:
    model: Any = Projections(Linear8bitLt.random)
    accelerate_for_cpu(model)
    originals = [
        change.original for change in model._hf_cpu_accel.journal.changes if hasattr(change, "original")
    ]
    linears = [module for module in originals if isinstance(module, Linear8bitLt)]
    assert len(linears) == 4
    assert all(linear.weight.numel() == linear.weight.CB.numel() == 0 for linear in linears)
    restore(model)
    assert model.q.weight.data_ptr() == model.q.weight.CB.data_ptr()


def test_originals_in_memory_and_dropped() -> None:
    for originals in ("memory", "drop"):
        model: Any = Projections(EXACT["torchao Int8"][0])
        qdata = model.q.weight.qdata.clone()
        accelerate_for_cpu(model, originals=originals)
        if originals == "drop":
            with pytest.raises(RuntimeError, match="originals='drop'"):
                restore(model)
            continue
        restore(model)
        assert torch.equal(model.q.weight.qdata, qdata)


@pytest.mark.parametrize("name", ["bitsandbytes int8", "torchao Int8", "quanto qint4"])
def test_the_original_state_dict_is_the_hosts(name: str) -> None:
    model: Any = Projections(EXACT[name][0])
    before = {key: [t.clone() for t in plain_tensors(value)] for key, value in model.state_dict().items()}
    x = torch.randn(3, COLUMNS)
    accelerate_for_cpu(model, dtype="float32")
    expected, journal = outputs(model, x), acceleration_of(model).journal
    state = original_state(model, journal)
    assert set(state) == set(before)
    for key, values in before.items():
        assert all(map(torch.equal, plain_tensors(state[key]), values))
    del state
    freed = [c.parameter for c in journal.changes if isinstance(c, FreedWeight)]
    assert freed
    assert not any(tensor.numel() for tensor in freed)
    assert all(map(torch.equal, outputs(model, x), expected))
    restore(model)
    after = {key: list(plain_tensors(value)) for key, value in model.state_dict().items()}
    assert all(all(map(torch.equal, after[key], values)) for key, values in before.items())


def test_a_weight_that_is_not_packed_cannot_be_written_packed() -> None:
    for make in (EXACT["torchao Int8"][0], EXACT["bitsandbytes int8"][0]):
        linear: Any = make(64, COLUMNS, torch.randn(64))
        with pytest.raises(
            ValueError, match=r"^a\.weight belongs to a quantized weight that is not packed \((torchao|bits)"
        ):
            in_floats(linear, "a.weight", linear.weight)
        assert in_floats(linear, "a.weight", linear.weight, with_stored=True) is linear.weight
        assert in_floats(linear, "a.bias", linear.bias) is linear.bias


def test_a_weight_that_a_table_reads_too_is_kept() -> None:
    model: Any = Projections(EXACT["torchao Int8"][0])
    model.table = nn.Embedding(64, COLUMNS).eval()
    model.table.weight = model.q.weight
    before = model.q.weight.qdata.clone()
    accelerate_for_cpu(model)
    assert isinstance(model.q, PackedLinear)
    assert torch.equal(model.table.weight.qdata, before)
