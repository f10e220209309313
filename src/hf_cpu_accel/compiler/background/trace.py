"""Compile a block, from one call of it, into a library for all calls of that form and all blocks of that structure.

`torch.export(strict=False)` exports the block: its Python runs once on fake tensors. The passes of the backend rewrite the graph,
and AOTInductor compiles it. Parameters, buffers and packed weights are inputs of the library, which contains no weights.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_cpu_accel.compiler import lowerings, report, torch_private
from hf_cpu_accel.compiler.background.calls import flatten, rebuilt
from hf_cpu_accel.compiler.background.compiled import LIBRARY, Compiled, Place, Step, size_name
from hf_cpu_accel.compiler.background.expressions import Expression
from hf_cpu_accel.compiler.background.reads import Read, digest, recorded
from hf_cpu_accel.compiler.background.sources import executed, stamps
from hf_cpu_accel.compiler.bind import Request
from hf_cpu_accel.compiler.capture import Captured
from hf_cpu_accel.compiler.passes import run_passes
from hf_cpu_accel.compiler.report import GraphReport
from hf_cpu_accel.compiler.rewriter import Rewriter
from hf_cpu_accel.rewrite.core.foreign_code import attempt
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import hooks_a_forward, shadow_of
from hf_cpu_accel.runtime.tracing import exporting


class NotCompiled(Exception):
    """The block is not compiled; the message says why."""


class _Call(nn.Module):
    """The block with the signature (args, kwargs)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


def compile_block(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path, *, threads: int
) -> Compiled:
    """Compile the forward of `block` for calls like `block(*args, **kwargs)`, sizes free, into `folder`/block.pt2.

    Args:
        threads: the number of threads that the library runs on.

    Raises:
        NotCompiled: the block cannot be compiled; the message says why.
    """
    _, tensors = flatten(args, kwargs)
    with torch.inference_mode(False), torch.no_grad():
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        args, kwargs = rebuilt((args, kwargs), copies)
        # A shadow, because parameters are fake tensors during an export, and other threads may call the block.
        traced = _shadow(block)
        with exporting(), executed() as files, recorded(traced) as attributes:
            program = _export(traced, args, kwargs)
    foreign = [value for value in attributes.values() if isinstance(value, nn.Module)]
    if any(module not in set(traced.modules()) for module in foreign):
        raise NotCompiled("it calls a module outside itself")
    reads = tuple(Read(path, name, digest(value)) for (path, name), value in attributes.items())
    places = tuple(_places(program, block))
    outputs, spec = _outputs(program)
    graph = program.graph_module
    sizes, ranges = _sizes(program, places)
    guards = _guards(program, args, kwargs)
    entry = GraphReport(nodes=len(graph.graph.nodes))
    kept, requests = _rewrite(program, places, entry)
    report.add(entry)
    with lowerings.in_use():
        torch_private.write_library(graph, str(folder / LIBRARY), threads)
    return Compiled(
        places=places,
        kept=tuple(kept),
        requests=tuple(requests),
        sizes=sizes,
        ranges=ranges,
        guards=guards,
        outputs=outputs,
        spec=spec,
        reads=reads,
        sources=stamps(files),
        graph=entry,
    )


def _shadow(block: nn.Module) -> nn.Module:
    if any(hooks_a_forward(module) for module in block.modules() if module is not block):
        raise NotCompiled("a hook of diffusers or accelerate replaces the forward of one of its modules")
    shadow = attempt("", shadow_of, block)
    if isinstance(shadow, Refusal):
        raise NotCompiled(shadow.reason)
    return shadow


def _export(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    free = torch_private.free_sizes((args, kwargs))
    try:
        program = torch.export.export(_Call(block), (args, kwargs), dynamic_shapes=free, strict=False)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise NotCompiled(f"it cannot be traced: {lines[0].strip()[:160]}") from error
    signature = program.graph_signature
    if signature.user_inputs_to_mutate or signature.buffers_to_mutate:
        raise NotCompiled("it writes to its inputs or buffers")
    return program


def _places(program: torch.export.ExportedProgram, block: nn.Module) -> Iterator[Place]:
    paths = None
    tensors = 0
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        if kind == "USER_INPUT":
            is_tensor = type(spec.arg).__name__ == "TensorArgument"
            yield Place("input", tensors) if is_tensor else Place("constant", None)
            tensors += is_tensor
        elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            paths = _tensor_paths(block) if paths is None else paths
            value = _value(program, str(spec.target))
            path = paths.get(_identity(value))
            if path is None and value.numel() > 1024:
                raise NotCompiled("it uses a tensor that none of its attributes holds")
            yield Place("constant", value.detach().clone()) if path is None else Place("state", path)
        else:
            raise NotCompiled(f"it takes an input of kind {kind.lower()}")


def _value(program: torch.export.ExportedProgram, name: str) -> Tensor:
    known = program.state_dict.get(name)
    value = program.constants[name] if known is None else known
    if not isinstance(value, Tensor):
        raise NotCompiled(f"it uses a constant of type {type(value).__name__}")
    return value


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


_NO_HOLDERS = (type, types.FunctionType, types.MethodType, types.ModuleType)


def _tensor_paths(block: nn.Module) -> dict[tuple[Any, ...], tuple[Step, ...]]:
    """Return {identity: steps} of the tensors in the parameters, buffers and other objects of the block."""
    paths: dict[tuple[Any, ...], tuple[Step, ...]] = {}
    seen: set[int] = set()
    queue: list[tuple[Any, tuple[Step, ...]]] = [(block, ())]
    while queue:
        value, path = queue.pop(0)
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                paths.setdefault(_identity(value), path)
            continue
        if id(value) in seen or len(path) > 24:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            named = ((name, part) for name, part in value.items() if type(name) in (int, str))
            queue.extend((part, (*path, ("item", name))) for name, part in named)
        elif isinstance(value, (tuple, list)):
            queue.extend((part, (*path, ("item", index))) for index, part in enumerate(value))
        elif hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS):
            queue.extend((part, (*path, ("attribute", name))) for name, part in vars(value).items())
    return paths


def _sizes(
    program: torch.export.ExportedProgram, places: tuple[Place, ...]
) -> tuple[tuple[tuple[int | str, ...], ...], dict[str, tuple[int, int | None]]]:
    sizes = []
    nodes = program.graph_module.graph.find_nodes(op="placeholder")
    for node, place in zip(nodes, places, strict=True):
        if place.kind == "input":
            sizes.append(tuple(_named(size) for size in node.meta["val"].shape))
    ranges = torch_private.ranges_of(program)
    named = {size for shape in sizes for size in shape if isinstance(size, str)}
    symbols = named & ranges.keys()
    if not all(_is_expression_of(symbols, size) for size in named - symbols):
        raise NotCompiled("the relation between the sizes of its inputs cannot be checked")
    return tuple(sizes), ranges


def _is_expression_of(names: Set[str], text: str) -> bool:
    """Return whether `text` is an expression of these names, so that later calls can be checked."""
    try:
        return Expression(text).names <= names
    except ValueError:
        return False


def _guards(
    program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """Return the program's guards as conditions on the sizes of the call's tensors."""
    named = _SizesNamed({"args": args, "kwargs": kwargs})
    guards = [
        ast.unparse(named.visit(ast.parse(guard, mode="eval"))) for guard in torch_private.guards_of(program)
    ]
    if not all(_is_expression_of(named.names, guard) for guard in guards):
        raise NotCompiled("a condition on the sizes of its inputs cannot be checked")
    return tuple(guards)


class _SizesNamed(ast.NodeTransformer):
    """Replaces `L['args'][0].size()[1]`, torch's notation for a size of an argument, by `size_name`.

    Attributes:
        names: the names of all sizes.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._known: dict[str, str] = {}
        for number, (path, tensor) in enumerate(_tensors("L", arguments)):
            for dim in range(tensor.dim()):
                self._known[f"{path}.size()[{dim}]"] = size_name(number, dim)
        self.names = frozenset(self._known.values())

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        name = self._known.get(ast.unparse(node))
        return node if name is None else ast.Name(name, ast.Load())


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `value`, in the order of `flatten`, each with the Python expression of its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | tuple | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{path}[{key!r}]", part)


def _named(size: Any) -> int | str:
    """Return a size as a number, or its symbol or formula as text."""
    text = str(size)
    return int(text) if text.isdecimal() else text


def _rewrite(
    program: torch.export.ExportedProgram, places: tuple[Place, ...], entry: GraphReport
) -> tuple[list[int], list[Request]]:
    graph = program.graph_module
    nodes = graph.graph.find_nodes(op="placeholder")
    state = frozenset(index for index, place in enumerate(places) if place.kind == "state")
    captured = Captured(graph, [node.meta.get("val") for node in nodes], state, {})
    with torch_private.as_if_traced(captured.inputs):
        rewriter = Rewriter(captured)
        entry.rewrites = run_passes(rewriter)
        kept, requests = rewriter.finish()
    graph.recompile()
    entry.record(graph.graph)
    return kept, requests


def _outputs(program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], str]:
    """Return the flat outputs of the block and their nesting, and remove constant outputs from the graph."""
    graph = program.graph_module.graph
    (node,) = graph.find_nodes(op="output")
    outputs: list[Any] = []
    tensors: list[Node] = []
    for value in node.args[0]:
        if not isinstance(value, Node):
            outputs.append(("constant", value))
        elif isinstance(value.meta["val"], Tensor):
            outputs.append(len(tensors))
            tensors.append(value)
        else:
            raise NotCompiled("it returns a size of a tensor")
    if not tensors:
        raise NotCompiled("it returns no tensor")
    node.args = (tuple(tensors),)
    spec = torch_private.written_spec(program)
    try:
        torch_private.nested(spec)
    except ValueError as error:
        raise NotCompiled(f"its output has {error}") from error
    return tuple(outputs), spec
