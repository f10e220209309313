"""Only models on the CPU are accelerated: other places are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

KEYWORD = "cpu_optimize"
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def without_strategy(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a loader without a `device_map` such as "auto", where it has nothing to choose from: on a machine without
    accelerator all goes to the CPU."""
    asked = options.get("device_map")
    has_choice = not isinstance(asked, str) or asked not in _STRATEGIES or torch.accelerator.is_available()
    return {name: value for name, value in options.items() if has_choice or name != "device_map"}


def check_placement(device: object = None, device_map: object = None, asked: str = KEYWORD) -> None:
    """Refuse a placement off the CPU before a large model is loaded only to be refused afterwards.

    Args:
        device: as in `transformers.pipeline`: None, a name, a number (-1 is the CPU) or a `torch.device`.
        device_map: as in `from_pretrained`: None, a device, a strategy such as "auto", or module name ->
            device.
        asked: what asks for the CPU.

    Raises:
        ValueError: when one of them is anything but the CPU.
    """
    if device is not None and not _is_cpu(device):
        raise ValueError(
            f"device={device!r} together with {asked}: only models on the CPU are accelerated; leave "
            f"{asked} out, or pass device='cpu'"
        )
    devices = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if device_map is not None and not all(_is_cpu(one) for one in devices):
        raise ValueError(
            f"device_map={device_map!r} together with {asked}: the map may put modules on other devices or "
            "offload them, and only models on the CPU are accelerated; leave device_map out, or pass "
            "device_map='cpu'"
        )


def _is_cpu(device: object) -> bool:
    if isinstance(device, int):
        return device == -1  # transformers.pipeline's number for the CPU; 0 and up are accelerators
    return str(device) == "cpu" or str(device).startswith("cpu:")
