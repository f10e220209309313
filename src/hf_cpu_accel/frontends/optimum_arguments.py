"""Translate the `from_pretrained` arguments of optimum's classes for ONNX Runtime and OpenVINO."""

from __future__ import annotations

import warnings
from typing import Any

from hf_cpu_accel.frontends.placement import KEYWORD

_PROVIDER = "CPUExecutionProvider"
_BITS = {8: "int8", 4: "int4"}
# Settings for the preparation of another engine. They are ignored, because nothing needs a preparation here.
_IGNORED = (
    "compile",
    "dynamic_shapes",
    "use_io_binding",
    "use_merged",
    "stateful",
    "model_save_dir",
    "task",
)
# Settings of another engine without an equivalent.
_UNKNOWN = ("ov_config", "session_options", "provider_options")
_FILES = (
    "file_name",
    "encoder_file_name",
    "decoder_file_name",
    "decoder_with_past_file_name",
    "from_onnx",
)


def translate_arguments(kwargs: dict[str, Any], cpu_optimize: Any) -> tuple[dict[str, Any], Any]:
    """Return the arguments without those of other backends, and the value of `cpu_optimize` that they imply.

    `load_in_8bit=True`, `load_in_4bit=True` and the `quantization_config` of OpenVINO with 8 or 4 bits become `"int8"` and
    `"int4"`.

    Args:
        kwargs: arguments of `from_pretrained`.
        cpu_optimize: the value of the keyword.

    Raises:
        ValueError: another device than the CPU, a file in another format, or contradicting dtypes.
    """
    ours = {
        name: value
        for name, value in kwargs.items()
        if name not in (*_IGNORED, *_UNKNOWN, *_FILES, "device", "provider", "providers")
    }
    _check_device(kwargs)
    for name in _FILES:
        if kwargs.get(name):
            raise ValueError(
                f"{name}={kwargs[name]!r} is a file of another backend, which is not supported; pass the original model or a "
                "packed folder"
            )
    unknown = [name for name in _UNKNOWN if kwargs.get(name)]
    if unknown:
        warnings.warn(
            f"{', '.join(unknown)}: settings of another backend are ignored; use {KEYWORD}=CPUAccelConfig(...)",
            UserWarning,
            stacklevel=5,
        )
    dtype = _requested_dtype(ours)
    if dtype is None:
        return ours, cpu_optimize
    if cpu_optimize not in (None, True, dtype):
        raise ValueError(
            f"{KEYWORD}={cpu_optimize!r} contradicts an argument that requests {dtype!r} weights: pass only one of them"
        )
    return ours, dtype


def check_device(device: Any) -> None:
    """Check that a device is the CPU, also in capitals as in OpenVINO.

    Raises:
        ValueError: another device.
    """
    if str(device).lower().partition(":")[0] not in ("cpu", "-1", "auto"):
        raise ValueError(f"device={device!r} is not supported; pass device='cpu', or leave it out")


def _check_device(kwargs: dict[str, Any]) -> None:
    if kwargs.get("device") is not None:
        check_device(kwargs["device"])
    provider, providers = kwargs.get("provider"), kwargs.get("providers")
    for name in (*((provider,) if provider is not None else ()), *(providers or ())):
        if name != _PROVIDER:
            raise ValueError(f"provider={name!r} is not supported; pass {_PROVIDER!r}, or leave it out")


def _requested_dtype(kwargs: dict[str, Any]) -> str | None:
    """Remove the arguments of other backends that request a dtype from `kwargs`, and return the dtype."""
    requested = {bits for bits in _BITS if kwargs.pop(f"load_in_{bits}bit", False)}
    config = kwargs.get("quantization_config")
    bits = config.get("bits") if isinstance(config, dict) else getattr(config, "bits", None)
    of_transformers = "quant_method" in config if isinstance(config, dict) else not _is_of_openvino(config)
    if config is not None and not of_transformers:
        del kwargs["quantization_config"]
        if bits not in _BITS:
            raise ValueError(f"quantization_config with bits={bits!r} is not supported; accepted are 8 and 4")
        requested.add(bits)
    if len(requested) > 1:
        raise ValueError("8 and 4 bits are requested at once: pass only one of load_in_8bit and load_in_4bit")
    return _BITS[requested.pop()] if requested else None


def _is_of_openvino(config: Any) -> bool:
    return type(config).__module__.startswith("optimum.intel")
