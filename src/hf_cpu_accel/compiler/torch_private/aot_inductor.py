"""Writing and loading compiled code with AOTInductor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def write_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> None:
    """Compile the program, with its weights, into a file."""
    args, kwargs = program.example_inputs
    graph = program.module(check_guards=False)
    _package(graph, args, kwargs, path, {"aot_inductor.metadata": metadata})


def load_package(path: str) -> tuple[Callable[..., list[Any]], dict[str, str]]:
    """Return a function that runs the code in a file of `write_package` and returns the flat outputs, and the file's metadata."""
    from torch._inductor import aoti_load_package
    from torch.utils._pytree import tree_leaves

    compiled = aoti_load_package(path)
    return lambda **inputs: tree_leaves(compiled(**inputs)), compiled.get_metadata()


def write_library(graph: GraphModule, path: str, threads: int) -> None:
    """Compile an exported graph, whose placeholders have fake tensors, into a file, for that many threads."""
    from torch.fx.graph import CodeGen

    graph.graph.set_codegen(CodeGen())  # flat inputs and outputs
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # The code around the kernels is long and runs once per call: optimizing it takes most of the time and gains nothing.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp.threads": threads}
    with torch.no_grad():
        _package(graph, tuple(inputs), {}, path, options)


def _package(
    graph: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], path: str, options: dict[str, Any]
) -> None:
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti

    # Into a separate folder. Inductor names its files by their content, so another process that compiles the same would rewrite
    # them while they are packed here.
    with tempfile.TemporaryDirectory() as folder:
        settings = {**options, "aot_inductor.package": True, "aot_inductor.output_path": folder}
        files: Any = aot_compile(graph, args, kwargs, options=settings)
        package_aoti(path, {"model": files})


def load_library(path: str) -> Callable[..., list[Tensor]]:
    """Return a function that runs a library of `write_library`, without importing Inductor."""
    # One runner: concurrent calls wait for each other.
    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    return lambda *inputs: loader.boxed_run(list(inputs))
