"""Originals mapped from their checkpoint stay there: nothing is written, and `restore` returns every bit."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, restore


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _model():
    return nn.ModuleDict({"a": nn.Linear(65, 48), "b": nn.Linear(48, 64)}).eval()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def path(request, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(_model().to(request.param).state_dict(), path)
    return path


@pytest.fixture
def model(path):
    state = load_file(path)
    model = _model().to(next(iter(state.values())).dtype)
    model.load_state_dict(state, assign=True)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_nothing_is_written_and_every_bit_comes_back(model, path, home, dtype):
    accelerate_for_cpu(model, dtype=dtype)
    assert model["a"].packed_dtype == dtype
    assert not home.exists()
    restore(model)
    expected = load_file(path)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model["a"].weight.stride() == (65, 1)


def test_what_was_written_to_after_loading_is_copied(model, home):
    model["a"].weight.data[3, 3] = 7
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype="int8")
    assert home.exists()
    restore(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_file_that_was_deleted_or_replaced_still_gives_the_weights(model, path):
    expected = {name: value.clone() for name, value in load_file(path).items()}
    accelerate_for_cpu(model, dtype="int8")
    path.unlink()
    save_file({"other": torch.ones(5)}, path)
    restore(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("change", ["appended", "written"])
def test_a_file_that_was_written_to_is_named_and_the_model_stays_accelerated(model, path, change):
    accelerate_for_cpu(model, dtype="int8")
    input = torch.ones(1, 65, dtype=model["a"].weight_dtype)
    output = model["a"](input)
    with path.open("ab" if change == "appended" else "r+b") as file:
        file.write(b"x")
    for back in (restore, lambda target: accelerate_for_cpu(target, dtype="float32")):
        with pytest.raises(RuntimeError, match=r"model\.safetensors, which has changed.*from_pretrained"):
            back(model)
    assert torch.equal(model["a"](input), output)


def test_deep_copies_restore_and_pickles_leave_the_weights_behind(model, path):
    expected = load_file(path)
    accelerate_for_cpu(model, dtype="int8")
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="load it again with from_pretrained"):
        restore(pickle.loads(pickle.dumps(model)))
    for each in (model, copied):
        restore(each)
        assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())


def test_dropped_originals_are_gone(model):
    accelerate_for_cpu(model, dtype="int8", originals="drop")
    with pytest.raises(RuntimeError, match="originals='drop'"):
        restore(model)
