"""What `save_pretrained` and `from_pretrained` refuse of packed folders, and what a plain save of an accelerated model writes."""

from __future__ import annotations

import json
import os
import random
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.distributed import DistributedConfig

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.packing.tensor_file import DamagedFile
from tests.frontends.packed.packed_cases import bert, mixtral
from tests.mutations import truncate
from tests.packing.mutated_files import flip_header, flip_payload
from tests.programs import run_program

FILE = "cpu_accel.safetensors"
pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def packed(tmp_path):
    model, _, _ = bert()
    accelerate_for_cpu(model.eval(), dtype="int8")
    model.save_pretrained(tmp_path, packed=True)
    return tmp_path


@pytest.mark.parametrize("case", range(24))
def test_a_changed_file_loads_nothing(packed, case):
    draw = random.Random(case)
    mutate = (flip_header, flip_payload, truncate)[case % 3]
    content = (packed / FILE).read_bytes()
    (packed / FILE).unlink()
    (packed / FILE).write_bytes(mutate(content, draw))
    with pytest.raises(DamagedFile, match=r"cpu_accel.safetensors cannot be loaded.*Nothing was loaded"):
        AutoModel.from_pretrained(packed)


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"]
    path.write_text(
        json.dumps({**config, "quantization_config": {**quantization, **changes.pop("said", {})}, **changes})
    )


def test_a_newer_format_is_named_before_anything_is_read(packed):
    change_config(packed, said={"format_version": 2, "library_version": "9.0", "later": 1})
    with pytest.raises(
        ValueError, match=r"format version 2 .* reads 1: install the version that wrote it \(9.0\)"
    ):
        AutoModel.from_pretrained(packed)


def test_configs_of_other_models_are_rejected(packed):
    change_config(packed, intermediate_size=512)
    with pytest.raises(
        ValueError, match=r"does not fit this model.*config.json requires.*Nothing was loaded"
    ):
        AutoModel.from_pretrained(packed)


def test_other_devices_are_rejected(packed):
    with pytest.raises(ValueError, match="device_map='auto' is not supported with a packed folder"):
        AutoModel.from_pretrained(packed, device_map="auto")


def test_divided_models_are_rejected_before_the_search_for_files(packed):
    config = AutoConfig.from_pretrained(packed)
    config.distributed_config = DistributedConfig(tp_size=2)
    (packed / FILE).unlink()
    with pytest.raises(ValueError, match="cannot be divided among processes: load the original checkpoint"):
        AutoModel.from_pretrained(packed, config=config)


def test_other_settings_need_the_original_checkpoint(packed):
    with pytest.raises(RuntimeError, match="accelerate with other settings, load the checkpoint"):
        AutoModel.from_pretrained(packed, cpu_optimize="int4")


def test_without_this_package_the_folder_is_no_checkpoint(packed, tmp_path):
    """It would be loaded with most of its weights drawn at random."""
    code = f"from transformers import AutoModel; AutoModel.from_pretrained({str(packed)!r})"
    done = run_program(code, folder=tmp_path, environment=os.environ)
    assert done.returncode
    assert "no file named" in done.stderr.splitlines()[-1]


def test_only_accelerated_models_are_written_packed(tmp_path):
    model, _, _ = bert()
    with pytest.raises(
        ValueError,
        match=r"packed=True, but this BertForSequenceClassification is not accelerated, or only as a part",
    ):
        model.save_pretrained(tmp_path, packed=True)
    with pytest.raises(TypeError, match="packed='yes': expected True, False"):
        model.save_pretrained(tmp_path, packed="yes")
    assert not list(tmp_path.iterdir())


def test_packed_folders_are_not_pushed_while_saving(tmp_path):
    model, _, _ = bert()
    accelerate_for_cpu(model.eval())
    with pytest.raises(
        ValueError,
        match=r"not supported with push_to_hub=True: save the folder, then call huggingface_hub.upload_folder",
    ):
        model.save_pretrained(tmp_path, packed=True, push_to_hub=True)


@pytest.mark.parametrize("originals", ["disk", "memory"])
@pytest.mark.parametrize("make", [bert, mixtral])
def test_a_plain_save_writes_the_original_weights(tmp_path, originals, make):
    model, _, auto = make()
    before = {name: value.clone() for name, value in model.eval().state_dict().items()}
    accelerate_for_cpu(model, dtype="int8", originals=originals)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
    assert explain(model).replaced
    after = auto.from_pretrained(tmp_path).state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_plain_save_without_originals_warns_and_writes_rounded_weights(tmp_path):
    model, inputs, auto = bert()
    before = model.eval()(**inputs)[0]
    accelerate_for_cpu(model, dtype="int8", originals="drop")
    with pytest.warns(UserWarning, match=r"rounded to int8.*Pass packed=True to write the packed weights"):
        model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert not explain(loaded).replaced
    assert not torch.equal(loaded(**inputs)[0], before)
    torch.testing.assert_close(loaded(**inputs)[0], before, atol=0.05, rtol=0)


def test_packed_false_writes_the_plain_weights(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model = AutoModelForSequenceClassification.from_pretrained(packed)
    with pytest.warns(UserWarning, match="rounded to int8"):
        model.save_pretrained(folder, packed=False)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not explain(AutoModelForSequenceClassification.from_pretrained(folder)).replaced
    model.save_pretrained(folder)
    assert (folder / FILE).exists()
    assert not (folder / "model.safetensors").exists()
    assert explain(AutoModelForSequenceClassification.from_pretrained(folder)).dtype == "int8"
