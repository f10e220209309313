"""The versions of torch on which the private names were checked."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

import torch

# torch "major.minor" -> how it was checked. A version that is missing is served by plain Inductor.
CHECKED = {
    "2.13": "tests/compiler on 2.13.0+cpu",
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


@lru_cache(maxsize=1)
def problem() -> str | None:
    """Why the private names cannot be relied upon, None if they can."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in CHECKED:
        return f"torch {torch.__version__} is not among the versions it was checked on ({', '.join(CHECKED)})"
    for name in _MODULES:
        try:
            import_module(name)
        except ImportError as error:
            return f"torch {torch.__version__} lacks a module that it needs: {error}"
    return None
