"""More vision and speech models: the outputs stay, and the layers that were recognized stay recognized."""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from tests.tasks.families import FAMILIES

_BOUNDS = {"float32": 2e-4, "int8": 0.25}


@pytest.mark.parametrize("dtype", _BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_family(name: str, dtype: str) -> None:
    torch.set_num_threads(1)
    family = FAMILIES[name]
    with torch.inference_mode(False):
        model, inputs = family.build(), family.inputs()
    before = model(**inputs)[0]
    accelerate_for_cpu(model, dtype=dtype)
    plan = explain(model)
    assert sum(item.scope == "layer" for item in plan.replaced) == family.whole_layers
    for _ in range(2):
        after = model(**inputs)[0]
        assert row_error(after.flatten(), before.flatten()) <= _BOUNDS[dtype]
    assert torch.equal(restore(model)(**inputs)[0], before)
