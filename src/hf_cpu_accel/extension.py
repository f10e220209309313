"""Load the kernel library, and report why it could not be loaded.

`torch.ops.hf_cpu_accel.*` exists in both cases. Without the library, reference implementations in plain PyTorch run under the same
names (see `ops/registry.py`). They are slower, but return the same results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from hf_cpu_accel import abi


@dataclass(frozen=True)
class ExtensionStatus:
    """The state of the kernel library.

    Attributes:
        loaded: True if the C++ kernels run.
        error: why the library is not loaded; None if it is.
        tier: instruction tier chosen at load: "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16" or "amx"
            ("amx_emulated" on request), on ARM "generic", "neon_dotprod" or "neon_i8mm_bf16"; None if not loaded.
        bf16_dot: True if bfloat16 GEMMs use the CPU's bfloat16 products: with AMX, or if they measured faster than float32 FMA.
        path: path of the library file; None if there is none.
        without_tiles: why AMX tiles are not available although the tier includes them; None if they are, or were not requested.
    """

    loaded: bool
    error: str | None
    tier: str | None
    bf16_dot: bool
    path: str | None
    without_tiles: str | None = None


@lru_cache(maxsize=1)
def status() -> ExtensionStatus:
    """Load the library on the first call, and return its state.

    Raises:
        ImportError: the library was built for another ABI.
    """
    library = next(iter(sorted(Path(__file__).parent.glob("_C*.so"))), None)
    if library is None:
        return ExtensionStatus(
            loaded=False,
            error="the kernels were not built; reinstall the package with a C++ compiler "
            "(HF_CPU_ACCEL_REQUIRE_EXTENSION=1 pip install -e . shows the compiler's message)",
            tier=None,
            bf16_dot=False,
            path=None,
        )
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        message = f"{library.name} does not load with torch {torch.__version__}: {error}"
        return ExtensionStatus(loaded=False, error=message, tier=None, bf16_dot=False, path=str(library))
    ops = torch.ops.hf_cpu_accel
    _check_abi(library.name, ops.abi_version() if hasattr(ops, "abi_version") else None)
    # Without the OpenMP backend, the fused ops use one thread: see csrc/team.h.
    ops.run_together("ATen parallel backend: OpenMP" in torch.__config__.parallel_info())
    return ExtensionStatus(
        loaded=True,
        error=None,
        tier=ops.tier(),
        bf16_dot=ops.bf16_dot(),
        path=str(library),
        without_tiles=ops.without_tiles() or None,
    )


def _check_abi(library: str, version: int | None) -> None:
    """Refuse a library that reads other numbers than `abi` describes. Its ops are registered, so references cannot replace them."""
    if version == abi.VERSION:
        return
    built_for = "an ABI without a version" if version is None else f"ABI {version:012x}"
    raise ImportError(
        f"{library} was built for {built_for}, and this version of hf_cpu_accel has ABI {abi.VERSION:012x}: rebuild the kernels "
        "(`make kernels` in a clone), or install the package again"
    )


def built_tiers() -> tuple[str, ...]:
    """Return the tiers whose kernels the library has, from the lowest to the highest; none if it is not loaded."""
    return tuple(torch.ops.hf_cpu_accel.built_tiers().split()) if status().loaded else ()
