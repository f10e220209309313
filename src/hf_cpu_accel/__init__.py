"""Faster inference with Hugging Face models on CPUs: `accelerate_for_cpu(pipeline)`."""

from __future__ import annotations

from hf_cpu_accel.api import accelerate_for_cpu, accelerated, explain, restore
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.frontends.import_hook import install, uninstall
from hf_cpu_accel.frontends.tasks import CLASS_NAMES, DIFFUSION
from hf_cpu_accel.plan import Plan, PlanItem

__version__: str  # of the installed package: see __getattr__

__all__ = [
    "CPUAccelConfig",
    "Plan",
    "PlanItem",
    "accelerate_for_cpu",
    "accelerated",
    "explain",
    "install",
    "restore",
    "uninstall",
]

# Adds the keyword `cpu_optimize=` to transformers when it is imported; `uninstall()` removes it.
install()


def __getattr__(name: str) -> object:
    """Return the version, or a class `CPUModelFor<Task>` or `CPU...Pipeline`, which need optimum or diffusers."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hf_cpu_accel")
    if name in CLASS_NAMES:
        from hf_cpu_accel.frontends import optimum

        return getattr(optimum, name)
    if name in DIFFUSION:
        from hf_cpu_accel.frontends import diffusion_pipelines

        return getattr(diffusion_pipelines, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *CLASS_NAMES, *DIFFUSION})
