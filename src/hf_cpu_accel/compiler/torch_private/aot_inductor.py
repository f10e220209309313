"""AOTInductor: compiled code in files, written and loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def write_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> None:
    """AOTInductor's code for the program, with its weights, in a file."""
    args, kwargs = program.example_inputs
    graph = program.module(check_guards=False)
    _package(graph, args, kwargs, path, {"aot_inductor.metadata": metadata})


def load_package(path: str) -> tuple[Callable[..., list[Any]], dict[str, str]]:
    """What runs the code in such a file and gives its outputs in a row, and the file's metadata."""
    from torch._inductor import aoti_load_package
    from torch.utils._pytree import tree_leaves

    compiled = aoti_load_package(path)
    return lambda **inputs: tree_leaves(compiled(**inputs)), compiled.get_metadata()


def write_library(graph: GraphModule, path: str, threads: int) -> None:
    """AOTInductor's code for an exported graph whose placeholders have fake tensors, run on that many threads."""
    from torch.fx.graph import CodeGen

    graph.graph.set_codegen(CodeGen())  # a row of inputs, a row of outputs
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

    # Into a folder of its own. Inductor names its files by what they hold: a process that compiles the same at this time would open
    # them to write them anew while they are packed here.
    with tempfile.TemporaryDirectory() as made:
        given = {**options, "aot_inductor.package": True, "aot_inductor.output_path": made}
        files: Any = aot_compile(graph, args, kwargs, options=given)
        package_aoti(path, {"model": files})


def load_library(path: str) -> Callable[..., list[Tensor]]:
    """What runs a library that `write_library` wrote; does not import Inductor."""
    # One runner: calls of several threads wait for each other.
    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    return lambda *inputs: loader.boxed_run(list(inputs))
