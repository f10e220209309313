"""AOTInductor: compiled code in files, written and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def write_package(program: torch.export.ExportedProgram, path: str, metadata: dict[str, str]) -> str:
    """AOTInductor's code for the program, with its weights, in a file. Returns the path."""
    from torch._inductor import aoti_compile_and_package

    settings = {"aot_inductor.metadata": metadata}
    written: str = aoti_compile_and_package(program, package_path=path, inductor_configs=settings)
    return written


def load_package(path: str) -> tuple[Callable[..., list[Any]], dict[str, str]]:
    """What runs the code in such a file and gives its outputs in a row, and the file's metadata."""
    from torch._inductor import aoti_load_package
    from torch.utils._pytree import tree_leaves

    compiled = aoti_load_package(path)
    return lambda **inputs: tree_leaves(compiled(**inputs)), compiled.get_metadata()


def write_library(graph: GraphModule, path: str, threads: int) -> None:
    """AOTInductor's code for an exported graph whose placeholders have fake tensors, run on that many threads."""
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti
    from torch.fx.graph import CodeGen

    graph.graph.set_codegen(CodeGen())  # a row of inputs, a row of outputs
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # The code around the kernels is long and runs once per call: optimising it takes most of the time and gains nothing.
    options = {
        "aot_inductor.package": True,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "cpp.threads": threads,
    }
    with torch.no_grad():
        files: Any = aot_compile(graph, tuple(inputs), options=options)
    package_aoti(path, {"model": files})


def load_library(path: str) -> Callable[..., list[Tensor]]:
    """What runs a library that `write_library` wrote; does not import Inductor."""
    # One runner: calls of several threads wait for each other.
    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    return lambda *inputs: loader.boxed_run(list(inputs))
