"""Writing and loading compiled code with AOTInductor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch


def write_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> None:
    """Compile the program, with its weights, into a file."""
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    args, kwargs = program.example_inputs
    graph = program.module(check_guards=False)
    # Into a separate folder. Inductor names its files by their content, so another process that compiles the same would rewrite
    # them while they are packed here.
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "aot_inductor.metadata": metadata,
            "aot_inductor.package": True,
            "aot_inductor.output_path": folder,
        }
        files: Any = aot_compile(graph, args, kwargs, options=options)
        package_aoti(path, {"model": files})


def load_package(path: str) -> tuple[Callable[..., list[Any]], dict[str, str]]:
    """Return a function that runs the code in a file of `write_package` and returns the flat outputs, and the file's metadata."""
    from torch._inductor import aoti_load_package
    from torch.utils._pytree import tree_leaves

    compiled = aoti_load_package(path)
    return lambda **inputs: tree_leaves(compiled(**inputs)), compiled.get_metadata()
