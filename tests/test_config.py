import dataclasses
import json

import pytest

from hf_cpu_accel import CPUAccelConfig

CHANGED = CPUAccelConfig("int4", "off", 3, ("model.pooler", "*.decoder"), False, "drop", "own", int4_group=64)


@pytest.mark.parametrize("config", [CPUAccelConfig(), CHANGED], ids=["defaults", "changed"])
def test_round_trips(config, tmp_path):
    assert CPUAccelConfig.from_dict(config.to_dict()) == config
    assert CPUAccelConfig.from_json(config.to_json()) == config
    path = config.save(tmp_path / "new" / "folder")
    assert path.name == "cpu_accel_config.json"
    assert CPUAccelConfig.load(path.parent) == config
    assert json.loads(path.read_text())["skip_modules"] == list(config.skip_modules)


def test_is_frozen_and_hashable():
    config = CPUAccelConfig(skip_modules=["a"])
    assert hash(config) == hash(CPUAccelConfig(skip_modules=("a",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "int8"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"dtype": "float16"},
            ValueError,
            r"dtype='float16' is unknown, accepted: 'auto', 'float32', 'bfloat16', 'int8', 'int8-weight', 'int4'",
        ),
        ({"dtypes": {"a": "int8-static"}}, ValueError, r"dtypes\['a'\]='int8-static' is unknown"),
        ({"static_range": "mean"}, ValueError, r"static_range='mean' is unknown, accepted: 'min-max'"),
        ({"int4_group": 48}, ValueError, r"int4_group=48: accepted are 32, 64, 128"),
        ({"dtype": 8}, TypeError, r"dtype=8: expected a string"),
        (
            {"compile": "later"},
            ValueError,
            r"compile='later' is unknown, accepted: 'auto', 'off', 'now', 'background'",
        ),
        ({"compile": True}, TypeError, r"compile=True"),
        ({"originals": "cloud"}, ValueError, r"originals='cloud'"),
        ({"providers": "torch"}, ValueError, r"providers='torch' is unknown, accepted: 'auto', 'own'"),
        ({"reorder": "metis"}, ValueError, r"reorder='metis' is unknown, accepted: 'none', 'degree', 'rcm'"),
        (
            {"kv_cache": "int4"},
            ValueError,
            r"kv_cache='int4' is unknown, accepted: 'auto', 'float32', 'bfloat16', 'int8'",
        ),
        ({"threads": 0}, ValueError, r"threads=0: expected at least 1"),
        ({"threads": 1.5}, TypeError, r"threads=1.5"),
        ({"threads": True}, TypeError, r"threads=True"),
        ({"verify": 1}, TypeError, r"verify=1: expected True, False or \"first\""),
        ({"verify": "second"}, ValueError, r"verify=.second.: accepted are True, False and \"first\""),
        ({"skip_modules": "pooler"}, TypeError, r"skip_modules='pooler': expected a tuple"),
        ({"skip_modules": (3,)}, TypeError, r"skip_modules contains 3"),
        ({"precision": "int8"}, ValueError, r"unknown CPUAccelConfig field 'precision', accepted: dtype"),
    ],
)
def test_bad_values_are_named_with_the_remedy(fields, error, message):
    with pytest.raises(error, match=message):
        CPUAccelConfig.from_dict(fields)


def test_from_dict_requires_a_mapping():
    with pytest.raises(TypeError, match="mapping"):
        CPUAccelConfig.from_dict("int8")


def test_load_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        CPUAccelConfig.load(tmp_path)
