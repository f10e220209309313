"""The versions of torch whose private names are known, and where these differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch


@dataclass(frozen=True)
class Names:
    """What a version has of that which others have in another way; the defaults are the newest.

    Attributes:
        size_hint: the function of symbolic_shapes that tells the size seen and adds no guard.
        several_passes: Inductor's settings for custom passes take several at once.
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
    # First, as it imports the code generators in an order in which they find each other.
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
    "torch._inductor.runtime.cache_dir_utils",
    "torch.fx.experimental.proxy_tensor",
)


def names() -> Names:
    """Of this torch; the newest that are known for one that is not."""
    return VERSIONS.get(_version(), Names())


def unknown_version() -> str | None:
    """Why the private names of this torch cannot be relied upon, None if they are known. Imports nothing."""
    if _version() in VERSIONS:
        return None
    return f"torch {torch.__version__} is not among the versions tested for compiling ({', '.join(VERSIONS)})"


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Why the private names cannot be used, None if they can."""
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
