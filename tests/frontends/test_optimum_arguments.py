"""Arguments and methods of optimum's classes for ONNX Runtime and OpenVINO, of which a user changes the name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cpu_accel import CPUModelForSequenceClassification, explain
from hf_cpu_accel.frontends.optimum_arguments import translate_arguments
from tests.frontends.packed.packed_cases import bert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert()[0].save_pretrained(tmp_path)
    return tmp_path


class OVWeightQuantizationConfig:
    """As much as is read of OpenVINO's."""

    __module__ = "optimum.intel.openvino.configuration"

    def __init__(self, bits: int) -> None:
        self.bits = bits


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_8bit": False}, None),
        ({"load_in_4bit": True}, "int4"),
        ({"quantization_config": OVWeightQuantizationConfig(8)}, "int8"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "int4"),
        ({"load_in_8bit": True, "quantization_config": {"bits": 8}}, "int8"),
    ],
)
def test_bits_of_other_backends_become_dtypes(given: dict[str, Any], dtype: str | None) -> None:
    assert translate_arguments({**given, "revision": "main"}, None) == ({"revision": "main"}, dtype)


def test_arguments_of_transformers_stay() -> None:
    given = {"quantization_config": {"quant_method": "gptq", "bits": 4}, "dtype": torch.bfloat16}
    assert translate_arguments(given, "int8") == (given, "int8")


def test_all_at_once(folder: Path) -> None:
    model = CPUModelForSequenceClassification.from_pretrained(
        folder,
        export=True,
        compile=False,
        device="CPU",
        dynamic_shapes=True,
        provider="CPUExecutionProvider",
        providers=["CPUExecutionProvider"],
        use_io_binding=False,
        use_cache=True,
        load_in_8bit=True,
    )
    assert explain(model).dtype == "int8"
    assert model.to("CPU").reshape(1, 8).eval() is model
    assert model.compile() is None
    assert not model.use_cache


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "GPU"}, "device='GPU' is not supported; pass device='cpu'"),
        ({"provider": "CUDAExecutionProvider"}, "CUDAExecutionProvider.*pass 'CPUExecutionProvider'"),
        (
            {"providers": ["CPUExecutionProvider", "TensorrtExecutionProvider"]},
            "TensorrtExecutionProvider",
        ),
        ({"file_name": "model_quantized.onnx"}, "file_name='model_quantized.onnx'.*original model"),
        ({"quantization_config": OVWeightQuantizationConfig(3)}, "bits=3"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "only one"),
        ({"load_in_8bit": True, "cpu_optimize": "float32"}, "'float32'.*'int8'"),
    ],
)
def test_unsupported_arguments_are_rejected(given: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        CPUModelForSequenceClassification.from_pretrained(folder, **given)


def test_settings_of_another_engine_are_named(folder: Path) -> None:
    with pytest.warns(UserWarning, match="ov_config.*CPUAccelConfig"):
        CPUModelForSequenceClassification.from_pretrained(
            folder, ov_config={"PERFORMANCE_HINT": "LATENCY"}, cpu_optimize=False
        )


@pytest.mark.parametrize(("dtype", "halved"), [("float32", "bfloat16"), ("int8", "int8")])
def test_half(dtype: str, halved: str, folder: Path) -> None:
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize=dtype)
    assert model.half() is model
    assert explain(model).dtype == halved
    assert model.dtype == torch.float32  # to the outside


def test_half_of_a_plain_model(folder: Path) -> None:
    model = CPUModelForSequenceClassification.from_pretrained(folder, cpu_optimize=False)
    assert model.half().dtype == torch.float16
