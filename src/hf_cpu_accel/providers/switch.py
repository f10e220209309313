"""Decide whether other providers are measured, and give the reason if not."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_cpu_accel import extension
from hf_cpu_accel.config import PROVIDERS
from hf_cpu_accel.runtime import hardware

VARIABLE = "HF_CPU_ACCEL_PROVIDERS"


def measured(asked: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `CPUAccelConfig.providers=asked` measures other providers on this machine.

    Raises:
        ValueError: the environment variable is neither "auto" nor "own".
    """
    return why_not(asked, environ) is None


def why_not(asked: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return why only this package's kernels are used, or None if other providers are measured.

    Raises:
        ValueError: the environment variable is neither "auto" nor "own".
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
        # A cap simulates an older CPU, on which torch would not have its faster kernels either.
        return f"{hardware.ISA_VARIABLE} caps the instruction tier"
    return None
