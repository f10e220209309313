"""The versions of torch whose private names are tested, and their differences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch


@dataclass(frozen=True)
class Names:
    """The names that differ between versions; the defaults are those of the newest.

    Attributes:
        size_hint: the function of symbolic_shapes that returns the size seen without adding a guard.
        several_passes: whether Inductor's settings for custom passes accept several.
    """

    size_hint: str = "optimization_hint"
    several_passes: bool = True


# torch "major.minor" -> its names. The tests run on 2.13, and passed on 2.11 and 2.15, too. Of 2.12 and 2.14 the sources
# were compared, and the modules below imported: run `make test-torch TORCH=2.14.1`.
VERSIONS = {
    "2.11": Names(size_hint="size_hint", several_passes=False),
    "2.12": Names(several_passes=False),
    "2.13": Names(),
    "2.14": Names(),
    "2.15": Names(),
}

_MODULES = (
    # First, because it imports the code generators in the right order.
    "torch._inductor.lowering",
    "torch._dispatch.python",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.utils",
    "torch._guards",
    "torch._inductor.codegen.cpp_gemm_template",
    "torch._inductor.codegen.cpp_template_kernel",
    "torch._inductor.compile_fx",
    "torch._inductor.cpp_builder",
    "torch._inductor.custom_graph_pass",
    "torch.fx.experimental.proxy_tensor",
)


def names() -> Names:
    """Return the names of this torch; those of the newest tested version if this one is not tested."""
    return VERSIONS.get(_version(), Names())


def unknown_version() -> str | None:
    """Return why the private names of this torch are not tested, or None. Imports nothing."""
    if _version() in VERSIONS:
        return None
    return f"torch {torch.__version__} is not among the versions tested for compiling ({', '.join(VERSIONS)})"


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Return why the private names cannot be used, or None."""
    if reason := unknown_version():
        return reason
    for name in _MODULES:
        try:
            import_module(name)
        except ImportError as error:
            return f"torch {torch.__version__} lacks a module that compiling needs: {error}"
    return None


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
