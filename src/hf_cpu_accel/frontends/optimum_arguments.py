"""What code written for optimum's classes for ONNX Runtime and OpenVINO passes to `from_pretrained`, in our words."""

from __future__ import annotations

import warnings
from typing import Any

from hf_cpu_accel.frontends.placement import KEYWORD

_PROVIDER = "CPUExecutionProvider"
_BITS = {8: "int8", 4: "int4"}
# How the other engine prepares itself. There is nothing to prepare here, so that any value gives what it asks for.
_NEEDLESS = (
    "compile",
    "dynamic_shapes",
    "use_io_binding",
    "use_merged",
    "stateful",
    "model_save_dir",
    "task",
)
# Settings of the other engine, without a counterpart that would mean the same.
_UNKNOWN = ("ov_config", "session_options", "provider_options")
_FILES = (
    "file_name",
    "encoder_file_name",
    "decoder_file_name",
    "decoder_with_past_file_name",
    "from_onnx",
)


def in_our_words(kwargs: dict[str, Any], cpu_optimize: Any) -> tuple[dict[str, Any], Any]:
    """The arguments without those of other back ends, and what `cpu_optimize` means together with them.

    `load_in_8bit=True`, `load_in_4bit=True` and OpenVINO's `quantization_config` of 8 or 4 bits become `"int8"` and `"int4"`.

    Raises:
        ValueError: another device than the CPU, a file in another format, or two wishes about the weights.
    """
    ours = {
        name: value
        for name, value in kwargs.items()
        if name not in (*_NEEDLESS, *_UNKNOWN, *_FILES, "device", "provider", "providers")
    }
    _check_device(kwargs)
    for name in _FILES:
        if kwargs.get(name):
            raise ValueError(
                f"{name}={kwargs[name]!r}: files of other back ends are not read; name the original model or a packed folder"
            )
    unknown = [name for name in _UNKNOWN if kwargs.get(name)]
    if unknown:
        warnings.warn(
            f"{', '.join(unknown)}: settings of another back end, which mean nothing here; see {KEYWORD}=CPUAccelConfig(...)",
            UserWarning,
            stacklevel=5,
        )
    dtype = _asked_dtype(ours)
    if dtype is None:
        return ours, cpu_optimize
    if cpu_optimize not in (None, True, dtype):
        raise ValueError(
            f"{KEYWORD}={cpu_optimize!r} together with an argument that asks for {dtype!r} weights: use only one"
        )
    return ours, dtype


def check_device(device: Any) -> None:
    """Refuse all but the CPU, whose name OpenVINO writes in capitals.

    Raises:
        ValueError: naming the device.
    """
    if str(device).lower().partition(":")[0] not in ("cpu", "-1", "auto"):
        raise ValueError(f"device={device!r}: models run on the CPU; pass device='cpu', or leave it out")


def _check_device(kwargs: dict[str, Any]) -> None:
    if kwargs.get("device") is not None:
        check_device(kwargs["device"])
    provider, providers = kwargs.get("provider"), kwargs.get("providers")
    for given in (*((provider,) if provider is not None else ()), *(providers or ())):
        if given != _PROVIDER:
            raise ValueError(f"provider={given!r}: models run on the CPU; accepted is {_PROVIDER!r}")


def _asked_dtype(kwargs: dict[str, Any]) -> str | None:
    """The dtype of the weights that the arguments of other back ends ask for; those are taken out of `kwargs`."""
    asked = {bits for bits in _BITS if kwargs.pop(f"load_in_{bits}bit", False)}
    config = kwargs.get("quantization_config")
    bits = config.get("bits") if isinstance(config, dict) else getattr(config, "bits", None)
    of_transformers = "quant_method" in config if isinstance(config, dict) else not _is_of_openvino(config)
    if config is not None and not of_transformers:
        del kwargs["quantization_config"]
        if bits not in _BITS:
            raise ValueError(f"quantization_config with bits={bits!r}: accepted are 8 and 4")
        asked.add(bits)
    if len(asked) > 1:
        raise ValueError("8 and 4 bits are asked for at once: use only one")
    return _BITS[asked.pop()] if asked else None


def _is_of_openvino(config: Any) -> bool:
    return type(config).__module__.startswith("optimum.intel")
