"""The environment of a measurement: CPU, kernels and versions."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware

_PACKAGES = ("hf_cpu_accel", "torch", "transformers", "sentence-transformers", "optimum")


def environment() -> dict[str, object]:
    """Return the machine and the versions as JSON values, without importing the packages."""
    cpu = hardware.detect()
    kernels = extension.status()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu.model_name,
        "cores": cpu.physical_cores,
        "cgroup_quota": cpu.cgroup_quota,
        "memory_gib": round(cpu.memory_total / 2**30, 1),
        "kernels": "native" if kernels.loaded else "reference",
        "tier": kernels.tier if kernels.loaded else None,
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def summary(facts: dict[str, object], threads: int) -> str:
    """Return one line for a caption: CPU, tier, threads, versions."""
    versions = facts["versions"]
    assert isinstance(versions, dict)
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    kernels = f"{facts['tier']} kernels" if facts["kernels"] == "native" else "reference kernels (not loaded)"
    return f"{facts['cpu']}, {threads} thread{'s' if threads != 1 else ''}, {kernels}, {named}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
