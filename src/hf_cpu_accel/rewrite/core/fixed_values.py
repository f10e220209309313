"""Numbers that packed weights were made with: they cannot be changed while these serve, and whoever tries is told so."""

from __future__ import annotations

from typing import Any


def refuse_other(state: dict[str, Any], name: str, value: Any) -> None:
    """
    Args:
        state: the attributes of a module.

    Raises:
        RuntimeError: `name` is one of them already, and is not equal to `value`.
    """
    if name in state and state[name] != value:
        raise RuntimeError(
            f"{name} cannot be {value!r} in an accelerated model: packed weights were made with {state[name]!r}. Call "
            "hf_cpu_accel.restore, set it, and accelerate again"
        )
