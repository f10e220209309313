"""The keyword `cpu_optimize=`: what it accepts, where it works, and that plain calls stay plain.

What acceleration itself does is tested elsewhere; here a recorder stands in for it where only the call
matters.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)
from transformers.pipelines import TextClassificationPipeline

from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends import keyword

pytestmark = pytest.mark.usefixtures("installed")

# Looked up at run time: other tests install and uninstall in between.
LOADERS = {
    "auto": lambda *args, **kwargs: AutoModel.from_pretrained(*args, **kwargs),
    "model": lambda *args, **kwargs: BertModel.from_pretrained(*args, **kwargs),
    "pipeline": lambda *args, **kwargs: transformers.pipeline("text-classification", *args, **kwargs),
}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (True, CPUAccelConfig()),
        ("int8", CPUAccelConfig(dtype="int8")),
        ({"dtype": "bfloat16", "threads": 2}, CPUAccelConfig(dtype="bfloat16", threads=2)),
        (CPUAccelConfig(dtype="float32"), CPUAccelConfig(dtype="float32")),
    ],
)
def test_accepted_values(value, expected):
    assert keyword.cpu_config(value) == expected


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, "cpu_optimize=3 .*int.*accepted: a bool"),
        (torch.bfloat16, TypeError, "cpu_optimize=torch.bfloat16.*'bfloat16'"),
        ("int9", ValueError, "int9"),
        ({"dtyp": "int8"}, (TypeError, ValueError), "dtyp"),
    ],
)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_wrong_values_raise_before_anything_is_loaded(load, value, error, message, calls):
    with pytest.raises(error, match=message):  # "no-such-folder" would be an OSError
        load("no-such-folder", cpu_optimize=value)
    assert calls == []


@pytest.mark.parametrize(
    "cls", [AutoModel, AutoModelForSequenceClassification, BertModel, BertForSequenceClassification]
)
def test_from_pretrained_accelerates_the_loaded_model_once(cls, folder, calls):
    model = cls.from_pretrained(folder, cpu_optimize="bfloat16")
    assert [(target is model, config) for target, config in calls] == [
        (True, CPUAccelConfig(dtype="bfloat16"))
    ]
    assert not model.training
    assert "cpu_optimize" not in model.config.to_dict()


@pytest.mark.parametrize("value", [None, False, "absent"])
def test_without_the_keyword_nothing_happens(value, folder, calls):
    options = {} if value == "absent" else {"cpu_optimize": value}
    assert type(AutoModel.from_pretrained(folder, **options)) is BertModel
    assert type(BertModel.from_pretrained(folder, **options)) is BertModel
    assert isinstance(
        transformers.pipeline("text-classification", folder, **options), TextClassificationPipeline
    )
    assert calls == []


def test_loading_info_still_comes_back(folder, calls):
    model, info = BertForSequenceClassification.from_pretrained(
        folder, cpu_optimize=True, output_loading_info=True
    )
    assert calls == [(model, CPUAccelConfig())]
    assert not info["missing_keys"]


def test_other_loading_keywords_pass_through(folder, calls):
    model = AutoModel.from_pretrained(
        folder, cpu_optimize=True, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert len(calls) == 1


def test_subclass_with_its_own_from_pretrained(folder, calls):
    class Custom(BertModel):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model = super().from_pretrained(*args, **kwargs)
            model.extra = "set by the subclass"
            return model

    model = Custom.from_pretrained(folder, cpu_optimize=True)
    assert model.extra == "set by the subclass"
    assert calls == [(model, CPUAccelConfig())]


def test_strict_subclass_behind_an_auto_class_never_sees_the_keyword(folder, calls):
    """As with remote code whose `from_pretrained` lists its arguments: the auto class takes the keyword."""

    class StrictConfig(BertConfig):
        model_type = "strict-bert"

    class Strict(BertModel):
        config_class = StrictConfig

        @classmethod
        def from_pretrained(cls, path, *args, config=None, **kwargs):
            assert keyword.KEYWORD not in kwargs
            return super().from_pretrained(path, config=config)

    AutoModel.register(StrictConfig, Strict)
    try:
        model = AutoModel.from_pretrained(
            folder, config=StrictConfig.from_pretrained(folder), cpu_optimize=True
        )
    finally:
        AutoModel._model_mapping._extra_content.pop(StrictConfig)
    assert type(model) is Strict
    assert calls == [(model, CPUAccelConfig())]


REMOTE_CODE = """
from transformers import BertConfig, BertModel

class RemoteConfig(BertConfig):
    model_type = "remote-bert"

class RemoteBert(BertModel):
    config_class = RemoteConfig
"""


def test_trust_remote_code(folder, tmp_path, calls, monkeypatch):
    import json
    import shutil

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    remote = tmp_path / "remote"
    shutil.copytree(folder, remote)
    (remote / "remote_bert.py").write_text(REMOTE_CODE)
    config = json.loads((remote / "config.json").read_text())
    config["model_type"] = "remote-bert"
    config["auto_map"] = {"AutoConfig": "remote_bert.RemoteConfig", "AutoModel": "remote_bert.RemoteBert"}
    (remote / "config.json").write_text(json.dumps(config))
    model = AutoModel.from_pretrained(str(remote), trust_remote_code=True, cpu_optimize="int8")
    assert type(model).__name__ == "RemoteBert"
    assert calls == [(model, CPUAccelConfig(dtype="int8"))]


def test_pipeline_function_accelerates_the_pipeline_once(folder, calls):
    pipe = transformers.pipeline("text-classification", folder, cpu_optimize="int8")
    assert calls == [(pipe, CPUAccelConfig(dtype="int8"))]
    assert pipe.device.type == "cpu"
    assert pipe("a good film")[0]["label"].startswith("LABEL_")


def test_pipeline_with_a_model_object_and_positional_arguments(folder, calls):
    model = BertForSequenceClassification.from_pretrained(folder)
    pipe = transformers.pipeline("text-classification", model, None, folder, cpu_optimize=True)
    assert pipe.model is model
    assert calls == [(pipe, CPUAccelConfig())]


def test_pipeline_class_called_directly(folder, calls):
    model = BertForSequenceClassification.from_pretrained(folder)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    pipe = TextClassificationPipeline(model=model, tokenizer=tokenizer, cpu_optimize=True)
    assert calls == [(pipe, CPUAccelConfig())]


def test_pipeline_imported_before_us_takes_the_keyword_too(folder, calls):
    early = transformers.pipeline
    while hasattr(early, "__wrapped__"):
        early = early.__wrapped__
    pipe = early("text-classification", folder, cpu_optimize=True)
    assert calls == [(pipe, CPUAccelConfig())]


@pytest.mark.parametrize(
    "device_map", ["auto", "balanced", "cuda", 0, {"": "disk"}, {"encoder": "cpu", "pooler": 0}]
)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_device_maps_off_the_cpu_are_refused_before_loading(load, device_map, calls, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"device_map=.*cpu_optimize.*device_map='cpu'"):
        load("no-such-folder", device_map=device_map, cpu_optimize=True)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_without_an_accelerator_a_strategy_means_the_cpu(load, strategy, folder, calls, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    loaded = load(folder, device_map=strategy, cpu_optimize=True)
    assert loaded.device.type == "cpu"
    assert not hasattr(loaded, "hf_device_map")
    assert calls == [(loaded, CPUAccelConfig())]


def test_a_strategy_among_the_options_of_the_model_means_the_cpu(folder, calls, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    options = {"device_map": "auto"}
    pipe = transformers.pipeline("text-classification", folder, model_kwargs=options, cpu_optimize=True)
    assert pipe.device.type == "cpu"
    assert options == {"device_map": "auto"}


@pytest.mark.parametrize("device", ["cuda:0", 0, torch.device("meta")])
def test_devices_other_than_the_cpu_are_refused_before_loading(device, calls):
    with pytest.raises(ValueError, match=r"device=.*device='cpu'"):
        transformers.pipeline("text-classification", "no-such-folder", device=device, cpu_optimize=True)


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"device": -1}, {"device": torch.device("cpu")}, {"device_map": "cpu"}]
)
def test_the_cpu_named_explicitly_is_accepted(options, folder, calls):
    pipe = transformers.pipeline("text-classification", folder, cpu_optimize=True, **options)
    assert pipe.device.type == "cpu"
    assert len(calls) == 1
