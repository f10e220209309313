"""Check that models are placed on the CPU before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

KEYWORD = "cpu_optimize"
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def without_strategy(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a loader without a `device_map` strategy such as "auto", on machines without an accelerator.

    There a strategy can only choose the CPU.
    """
    device_map = options.get("device_map")
    has_choice = (
        not isinstance(device_map, str) or device_map not in _STRATEGIES or torch.accelerator.is_available()
    )
    return {name: value for name, value in options.items() if has_choice or name != "device_map"}


def check_placement(device: object = None, device_map: object = None, feature: str = KEYWORD) -> None:
    """Check that a model will be placed on the CPU.

    Args:
        device: as in `transformers.pipeline`: None, a name, a number (-1 is the CPU) or a `torch.device`.
        device_map: as in `from_pretrained`: None, a device, a strategy such as "auto", or {module name: device}.
        feature: the feature that needs the CPU, for the message.

    Raises:
        ValueError: another device than the CPU.
    """
    if device is not None and not _is_cpu(device):
        raise ValueError(
            f"device={device!r} is not supported with {feature}, which needs the CPU; leave {feature} out, or pass "
            "device='cpu'"
        )
    devices = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if device_map is not None and not all(_is_cpu(one) for one in devices):
        raise ValueError(
            f"device_map={device_map!r} is not supported with {feature}, which needs the CPU: the map may put modules on other "
            "devices or offload them; leave device_map out, or pass device_map='cpu'"
        )


def _is_cpu(device: object) -> bool:
    if isinstance(device, int):
        return device == -1  # the number of the CPU in transformers.pipeline; 0 and up are accelerators
    return str(device) == "cpu" or str(device).startswith("cpu:")
