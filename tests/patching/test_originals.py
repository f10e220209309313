import copy
import os
import pickle
import shutil

import pytest
import torch
from torch import nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.patching.originals import DiskStore, make_store


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model():
    return nn.ModuleDict({"a": nn.Linear(64, 48), "b": nn.Linear(48, 64)}).eval()


def _values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_gives_back_every_bit(tmp_path, dtype):
    store = DiskStore(tmp_path)
    store.reserve(1000)
    tensors = [
        torch.randn(7, 5).to(dtype),
        torch.tensor([[float("inf"), -0.0]], dtype=dtype),
        torch.randn(6, 4).to(dtype).t(),
    ]
    tickets = [store.put(tensor) for tensor in tensors]
    for ticket, tensor in reversed(list(zip(tickets, tensors, strict=True))):
        back = store.get(ticket)
        assert torch.equal(back, tensor)
        assert torch.equal(back.signbit(), tensor.signbit())
    assert os.listdir(tmp_path) == []


def test_disk_stores_are_shared_by_deep_copies_and_left_behind_by_pickles(tmp_path):
    store = DiskStore(tmp_path)
    ticket = store.put(torch.ones(3))
    assert copy.deepcopy(store) is store
    with pytest.raises(RuntimeError, match="load it again with from_pretrained"):
        pickle.loads(pickle.dumps(store)).get(ticket)


@pytest.mark.parametrize("originals", ["disk", "memory"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int8-weight", "int4"])
def test_lossy_weights_come_back_exactly(model, originals, dtype):
    before, parameter = _values(model), model["a"].weight
    accelerate_for_cpu(model, dtype=dtype, originals=originals)
    assert (parameter.numel() == 0) == (originals == "disk")
    restore(model)
    assert model["a"].weight is parameter
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_file_has_no_name(model, home):
    accelerate_for_cpu(model, dtype="int8")
    assert (home / "originals").is_dir()
    assert os.listdir(home / "originals") == []


def test_float32_keeps_nothing(model, home):
    before = _values(model)
    accelerate_for_cpu(model, dtype="float32", originals="drop")
    assert model["a"].group.packed.nbytes > 0
    restore(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not home.exists()


def test_dropped_originals_refuse_to_come_back_and_leave_the_model_working(model):
    accelerate_for_cpu(model, dtype="int8", originals="drop")
    output = model["a"](torch.ones(1, 64))
    for back in (restore, lambda target: accelerate_for_cpu(target, dtype="float32")):
        with pytest.raises(RuntimeError, match=r"originals='drop'.*load it again with from_pretrained"):
            back(model)
    assert torch.equal(model["a"](torch.ones(1, 64)), output)
    assert explain(model).dtype == "int8"


def test_a_full_disk_is_noticed_before_anything_is_touched(model, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    modules = dict(model.named_modules())
    with pytest.raises(
        OSError, match=r"cannot store the original weights.*HF_CPU_ACCEL_HOME.*originals='memory'"
    ):
        accelerate_for_cpu(model, dtype="int8")
    assert dict(model.named_modules()) == modules
    assert explain(model).items == ()
    accelerate_for_cpu(model, dtype="int8", originals="memory")


def test_a_failing_write_undoes_everything(model, monkeypatch):
    before, pwrite, calls = _values(model), os.pwrite, []

    def failing(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=r"No space left on device.*HF_CPU_ACCEL_HOME"):
        accelerate_for_cpu(model, dtype="int8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(module) is nn.Linear for module in model.values())


def test_an_unwritable_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file/originals"):
        make_store("disk", [torch.ones(25)])


def test_short_writes_are_continued(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    store, tensor = DiskStore(tmp_path), torch.randn(50)
    assert torch.equal(store.get(store.put(tensor)), tensor)
