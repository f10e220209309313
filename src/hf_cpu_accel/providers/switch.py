"""Whether other providers are measured at all, and the sentence that says so."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_cpu_accel import extension
from hf_cpu_accel.config import PROVIDERS
from hf_cpu_accel.runtime import hardware

VARIABLE = "HF_CPU_ACCEL_PROVIDERS"


def measured(asked: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether `CPUAccelConfig.providers=asked` leads to measurements here.

    Raises:
        ValueError: the environment variable holds something else than "auto" or "own".
    """
    return why_not(asked, environ) is None


def why_not(asked: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Why only our kernels serve, or None if the fastest does.

    Raises:
        ValueError: the environment variable holds something else than "auto" or "own".
    """
    variable = (os.environ if environ is None else environ).get(VARIABLE, "")
    if variable not in ("", *PROVIDERS):
        raise ValueError(f"{VARIABLE}={variable!r}: expected 'auto' or 'own'")
    if asked == "own":
        return 'providers="own"'
    if variable == "own":
        return f"{VARIABLE}=own"
    if not extension.status().loaded:
        return "the kernels are not loaded"
    cpu = hardware.detect()
    if cpu.tier != cpu.uncapped_tier:
        # A capped CPU stands for a lesser one, on which torch would not have its better kernels either.
        return f"{hardware.ISA_VARIABLE} caps the instruction tier"
    return None
