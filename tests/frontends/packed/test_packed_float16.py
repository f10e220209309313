"""Models with float16 weights that are saved while they are accelerated, packed and as they were."""

import pytest
import torch
import transformers

from hf_cpu_accel import accelerate_for_cpu, restore
from tests.rewrite.float16_models import CASES, same, state

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["opt", "bert"])
def test_packed(name, dtype, tmp_path):
    case = CASES[name]
    model = case.build()
    before, dtypes = state(model), {key: value.dtype for key, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype=dtype)
    expected = case.call(model)
    model.save_pretrained(tmp_path, packed=True)
    loaded = type(case.build()).from_pretrained(tmp_path)
    assert loaded.dtype is torch.float16
    assert {key: value.dtype for key, value in loaded.state_dict().items()} == dtypes
    assert all(map(torch.equal, case.call(loaded), expected))
    if dtype == "float32":
        assert same(state(restore(loaded)), before)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_as_they_were(dtype, tmp_path):
    model = CASES["opt"].build()
    before = model.state_dict()
    accelerate_for_cpu(model, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = transformers.OPTForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype is torch.float16
    assert same(loaded.state_dict(), before)
