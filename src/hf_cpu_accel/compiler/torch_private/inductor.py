"""Inductor: compiling a graph, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from hf_cpu_accel.compiler.torch_private.versions import names


def compile_with_inductor(
    graph: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compile `graph` with Inductor, with `patches` to its config for this graph only. It takes ownership of the graph."""
    from torch._inductor.compile_fx import compile_fx

    for node in graph.graph.find_nodes(op="placeholder"):
        # With `cpp_wrapper` Inductor would use these as the inputs, without the symbolic sizes among them.
        node.meta.pop("val", None)
    compiled: Any = compile_fx(graph, list(inputs), config_patches=patches)
    return compiled


def plain_inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor's public function."""
    from torch import _inductor

    compiled: Any = _inductor.compile(graph, list(inputs))
    return compiled


def has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def inductor_default(name: str) -> Any:
    """Return the present value of a setting of Inductor's config.

    Raises:
        AttributeError: the setting does not exist.
    """
    from torch._inductor import config

    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def with_pass(uuid: Callable[[], str]) -> dict[str, Any]:
    """Return a config patch that adds `uuid` to the keys of Inductor's caches, after the user's custom passes."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    theirs: Any = config.post_grad_custom_pre_pass
    several = names().several_passes

    class Marker(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if theirs is not None and not several:
                theirs(graph)

        def uuid(self) -> Any:
            if theirs is None or several:
                return uuid()
            their_uuid = theirs.uuid()  # None: nothing is cached
            return None if their_uuid is None else (their_uuid, uuid())

    if not several:
        return {"post_grad_custom_pre_pass": Marker()}
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    return {"post_grad_custom_pre_pass": [*get_custom_graph_passes(theirs), Marker()]}
